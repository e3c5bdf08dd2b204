#!/usr/bin/env bash
# Makes the virtual environment $VENV with the first Python 3.11 to 3.13 that works, or says what is missing.
# Reads PYTHON (a command; empty: look for one), VENV (a folder) and TORCH (cpu: less disk is needed).
set -euo pipefail
VENV=${VENV:-.venv}

works() { "$@" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' > /dev/null 2>&1; }

if [ -x "$VENV/bin/python" ] && works "$VENV/bin/python" && "$VENV/bin/python" -m pip --version > /dev/null 2>&1; then
    exit 0
fi

if [ -e "$VENV" ] && [ ! -f "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
    echo "VENV=$VENV exists and is no virtual environment; it is left as it is. Name another folder: make VENV=.venv ..." >&2
    exit 1
fi

found=
tried=
if [ -n "${PYTHON:-}" ]; then candidates=$PYTHON; else candidates="python3.13 python3.12 python3.11 python3 python"; fi
for candidate in $candidates; do
    command -v "$candidate" > /dev/null 2>&1 || continue
    if works "$candidate"; then found=$candidate; break; fi
    tried="$tried
  $candidate: $("$candidate" -c 'import sys; print("version", sys.version.split()[0] + (", without venv or ensurepip" if (3, 11) <= sys.version_info[:2] <= (3, 13) else ""))' 2> /dev/null || echo "is there but does not run")"
done
if [ -z "$found" ]; then
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is no Python 3.11, 3.12 or 3.13 that works with venv." >&2
    else
        echo "privfl needs Python 3.11, 3.12 or 3.13 (with venv) and found none." >&2
    fi
    [ -z "$tried" ] || echo "Tried:$tried" >&2
    echo "Install one (Debian and Ubuntu: apt-get install python3 python3-venv; else https://www.python.org/downloads/)" >&2
    echo "or name it: make PYTHON=/path/to/python3.12 ..." >&2
    exit 1
fi

if [ "${TORCH:-}" = cpu ]; then needed_gb=2; else needed_gb=8; fi
parent=$(dirname "$VENV")
free_gb=$(df -Pk "$parent" 2> /dev/null | awk 'NR == 2 {print int($4 / 1000000)}')
if [ -n "$free_gb" ] && [ "$free_gb" -lt "$needed_gb" ]; then
    echo "The installation needs about $needed_gb GB of disk space, and $free_gb GB are free in $(cd "$parent" && pwd)." >&2
    [ "${TORCH:-}" = cpu ] || echo "Without a GPU, TORCH=cpu needs about 2 GB: make TORCH=cpu ..." >&2
    exit 1
fi

echo "Making $VENV with $("$found" --version) ($found)"
"$found" -m venv --clear "$VENV"
