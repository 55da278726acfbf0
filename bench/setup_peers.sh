#!/usr/bin/env bash
# A virtual environment with the peers that bench/step_overhead.py compares with, apart from the project's own:
#
#     bench/setup_peers.sh [FOLDER]        (default .venv-peers; PYTHON picks the interpreter)
#     .venv-peers/bin/python bench/step_overhead.py
#
# torch, timm and the rest are the versions of constraints.txt, so that every loop runs on the same kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
usage() {
    cat <<'USAGE'
usage: bench/setup_peers.sh [FOLDER]

Makes a virtual environment in FOLDER (default .venv-peers, below the checkout) with mprun and the peers that
bench/step_overhead.py compares with: lightning and accelerate. PYTHON names the interpreter (default python3).
USAGE
}

case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    -*) echo "setup_peers.sh: unknown option $1" >&2 && usage >&2 && exit 2 ;;
esac
if (($# > 1)); then
    echo "setup_peers.sh: one folder, not $#: $*" >&2 && usage >&2 && exit 2
fi
folder="${1:-.venv-peers}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
    "lightning>=2.5,<3" "accelerate>=1.5,<2"
"$folder/bin/python" - <<'SHOW'
from importlib.metadata import version
print(", ".join(f"{name} {version(name)}" for name in ("torch", "timm", "lightning", "accelerate")))
SHOW
