#!/usr/bin/env bash
# Everything that only a GPU can show, in one go of at most six minutes, on a machine without a network. See docs/gpu.md.
#
#   bench/gpu.sh [--wheels FOLDER] [--out FOLDER] [--device cuda|cpu] [--tiny] [--limit SECONDS] [--only SECTION ...]
#   bench/gpu.sh --fetch-wheels [--python 3.12] FOLDER
#
# The machine brings Python 3.11 or newer (PYTHON names it; python3 by default) with torch, torchvision, timm, numpy and
# scikit-learn. What else mprun needs may come as wheels, fetched where there is a network by --fetch-wheels. Nothing is
# installed: the wheels are unpacked into a temporary folder that Python looks at last, so what the machine has wins.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
# What mprun and its tests import, beyond what a machine for deep learning has.
needed=(hydra-core omegaconf wandb rich PyYAML pytest pytest-timeout hypothesis)
# No wheel of it is published; hydra-core 1.3 asks for this very version.
source_only=antlr4-python3-runtime==4.9.3

die() {
    echo "gpu.sh: $*" >&2
    exit 2
}

value() { # OPTION WHAT-IT-NEEDS [VALUE]
    [[ ${3:-} && $3 != -* ]] || die "$1 needs $2"
}

fetch() { # FOLDER VERSION
    local folder=$1 version=$2 platforms=()
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        platforms+=(--platform "${tag}_x86_64")
    done
    mkdir -p "$folder"
    "$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" "$source_only"
    "$python" -m pip download --quiet --only-binary=:all: --find-links "$folder" --dest "$folder" \
        --python-version "$version" --implementation cp "${platforms[@]}" -c "$root/constraints.txt" "${needed[@]}"
    echo "$(find "$folder" -name '*.whl' | wc -l) wheels, $(du -sm "$folder" | cut -f1) MB, for Python $version: $folder"
}

wheels='' fetch_for='' version=3.12 rest=()
while (($#)); do
    case $1 in
        --wheels) value "$1" "a folder" "${2:-}" && wheels=$2 && shift 2 ;;
        --fetch-wheels) fetch_for=yes && shift ;;
        --python) value "$1" "a version such as 3.12" "${2:-}" && version=$2 && shift 2 ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
        *) rest+=("$1") && shift ;;
    esac
done
if [[ $fetch_for ]]; then
    ((${#rest[@]} == 1)) || die "--fetch-wheels needs one folder, not '${rest[*]:-}'"
    fetch "${rest[0]}" "$version"
    exit
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Scripts, torch's compiler and the runs of the tests leave nothing behind.
export TMPDIR=$scratch TORCHINDUCTOR_CACHE_DIR=$scratch/inductor TRITON_CACHE_DIR=$scratch/triton
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 WANDB_MODE=offline HYDRA_FULL_ERROR=0
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [[ $wheels ]]; then
    compgen -G "$wheels/*.whl" >/dev/null || die "--wheels $wheels: no .whl file there; fetch them with --fetch-wheels"
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --no-warn-conflicts --target "$scratch/site" "$wheels"/*.whl
    mkdir "$scratch/start"
    # Python runs sitecustomize at its start, child processes' too. One of the machine's own is run as well.
    cat >"$scratch/start/sitecustomize.py" <<'PY'
import os
import site
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

site.addsitedir(os.environ["MPRUN_WHEELS"])
_here = os.path.dirname(os.path.abspath(__file__))
_own = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.abspath(p) != _here])
if _own is not None and _own.loader is not None:
    _own.loader.exec_module(module_from_spec(_own))
PY
    export MPRUN_WHEELS=$scratch/site PYTHONPATH=$scratch/start:$PYTHONPATH
fi
# Not exec: the trap cleans up.
"$python" "$root/bench/gpu.py" "${rest[@]}"
