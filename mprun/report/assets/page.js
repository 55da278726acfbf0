// Unpacks plotly, which lies compressed in this page, and draws the figures. Nothing is loaded from anywhere.
(async () => {
  const root = document.documentElement;
  const trouble = (text) => {
    const box = document.getElementById("trouble");
    box.textContent = text;
    box.classList.add("shown");
    root.dataset.state = "failed";
  };
  root.dataset.state = "unpacking";
  const packed = document.getElementById("plotly");
  if (!packed) {
    root.dataset.state = "ready";
    return;
  }
  if (typeof DecompressionStream === "undefined") {
    trouble("The plots are not drawn: this browser cannot unpack them (it has no DecompressionStream). Browsers since 2023 can. Words and tables are whole.");
    return;
  }
  try {
    const bytes = Uint8Array.from(atob(packed.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.appendChild(script);
    const figures = JSON.parse(document.getElementById("figures").textContent);
    const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    for (const [key, figure] of Object.entries(figures)) {
      await Plotly.newPlot(key, figure.data, figure.layout, { ...options, toImageButtonOptions: { filename: key } });
    }
    // Paper is narrower than the window, and what is folded away cannot be opened on it.
    const opened = [];
    window.addEventListener("beforeprint", () => {
      for (const one of document.querySelectorAll("details:not([open])")) { one.open = true; opened.push(one); }
      for (const key of Object.keys(figures)) Plotly.relayout(key, { width: 680 });
    });
    window.addEventListener("afterprint", () => {
      while (opened.length) opened.pop().open = false;
      for (const key of Object.keys(figures)) Plotly.relayout(key, { width: null, autosize: true });
    });
    root.dataset.state = "ready";
  } catch (error) {
    trouble("The plots could not be drawn: " + error);
    throw error;
  }
})();
