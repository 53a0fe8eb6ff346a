#!/usr/bin/env bash
# What this project does on one NVIDIA GPU: its GPU tests, the decision's kernels timed, probe, calibrate, and run on
# every tier. Prints one table. The checks end within 8 minutes; setting up .venv, where there is none, comes before.
# Changes nothing about the machine: no clocks, no modes; results go to a temporary folder, or to --keep FOLDER.
#
#   benchmarks/gpu_check.sh            on the first GPU
#   benchmarks/gpu_check.sh --cpu      the same steps without a GPU, small: whether they work, not how fast
#   benchmarks/gpu_check.sh --help     all options
set -euo pipefail
cd "$(dirname "$0")/.."

python=${CAEE_PYTHON:-.venv/bin/python}
# `make demo` makes a .venv too, without what the tests need.
if [[ -z ${CAEE_PYTHON:-} && ! -x .venv/bin/pytest ]]; then
  echo "Setting up .venv (some minutes, once)" >&2
  make --silent .venv/bin/.wheel .venv/bin/.tools >&2
fi
exec "$python" benchmarks/gpu_check.py "$@"
