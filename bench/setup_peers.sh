#!/usr/bin/env bash
# A virtual environment with the peers that bench/step_overhead.py compares with, apart from the project's own:
#
#     bench/setup_peers.sh [FOLDER]        (default .venv-peers; PYTHON picks the interpreter)
#     .venv-peers/bin/python bench/step_overhead.py
#
# torch, timm and the rest are the versions of constraints.txt, so that every loop runs on the same kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="${1:-.venv-peers}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
    "lightning>=2.5,<3" "accelerate>=1.5,<2"
"$folder/bin/python" - <<'SHOW'
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "lightning", "accelerate")))
SHOW
