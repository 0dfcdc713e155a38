#!/bin/sh
# Create or update the virtual environment that `make demo` and `make test` use:
#   tools/setup_venv.sh FOLDER [PYTHON]
# Install the pinned requirements and this package (editable). If the environment already matches
# requirements.txt, pyproject.toml, setup.py and the interpreter, return immediately.
set -eu
cd "$(dirname "$0")/.."
venv=$1
asked=${2:-}

fail() {
    echo "setup: $1" >&2
    exit 1
}

# Print major.minor of interpreter $1, or nothing if it does not run.
version_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

# Set $python to the requested interpreter, or to the first one on the PATH with a tested version.
find_python() {
    if [ -n "$asked" ]; then
        python=$asked
        case $(version_of "$python") in
            "") fail "cannot run PYTHON=$python" ;;
            2.* | 3.? | 3.10) fail "PYTHON=$python is Python $(version_of "$python"); 3.11 or newer is needed" ;;
        esac
        return
    fi
    for python in python3 python3.13 python3.12 python3.11; do
        case $(version_of "$python") in 3.11 | 3.12 | 3.13) return ;; esac
    done
    found=$(version_of python3)
    fail "no Python 3.11, 3.12 or 3.13 on the PATH (python3 is ${found:-missing}): install one (Debian, Ubuntu: apt-get install python3-venv) or choose one with PYTHON=/path/to/python"
}

find_python
version=$(version_of "$python")
stamp="$venv/installed"
identity="$("$python" -VV | tr '\n' ' ')in $(pwd)"
contents=$(cat requirements.txt pyproject.toml setup.py | cksum)
have_identity=$(sed -n 1p "$stamp" 2>/dev/null || true)
have_contents=$(sed -n 2p "$stamp" 2>/dev/null || true)
[ "$have_identity" = "$identity" ] && [ "$have_contents" = "$contents" ] && exit 0

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "Python $version has no venv module: install it (Debian, Ubuntu: apt-get install python$version-venv) or choose another interpreter with PYTHON="
# Recreating it would empty the folder that the link points to, which others may use.
[ ! -L "$venv" ] || fail "$venv is a symbolic link: remove it or choose another folder with VENV="
if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
    fail "$venv exists and is not a virtual environment: move it away or choose another folder with VENV="
fi
echo "setup: installing into $venv (Python $version); the first time takes a few minutes"
rm -f "$stamp"
keep=--clear # incomplete, moved, or made with another interpreter: start over
[ "$have_identity" = "$identity" ] && keep=
"$python" -m venv $keep "$venv" || fail "could not create $venv: see the message above"
quiet=
[ -t 1 ] || quiet=--quiet
"$venv/bin/python" -m pip install --disable-pip-version-check $quiet -r requirements.txt -e . ||
    fail "pip could not install the requirements: see its message above (is it the network or the disk space?) and run make again"
printf '%s\n%s\n' "$identity" "$contents" >"$stamp"
