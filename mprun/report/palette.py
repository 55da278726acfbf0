"""The colours of pictures and pages: Okabe and Ito's, which colour-blind readers tell apart; quiet greys for the rest."""

from __future__ import annotations

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY, LIGHT, LINE, INK = "#6B7079", "#C4C8CE", "#E9EBEE", "#2B2F36"
