# Sourced by the scripts of this folder, from the repository root: Python and virtual environments.

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Prints the command of a Python that is new enough: $PYTHON, else the first found on the PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        # Run it rather than look for it: a version manager's shim exists for Pythons that do not.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is no Python of version 3.11 or newer"
    done
    die "no Python 3.11 or newer on the PATH; install one, or set PYTHON=/path/to/python3"
}

# The build needs a C++17 compiler; CMake and MPI come as wheels.
need_compiler() {
    local compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null ||
        die "no C++ compiler ($compiler): install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
}

# A line that changes whenever what `pip install` reads does: the arguments and the files given.
fingerprint() {
    local paths=("$@")
    find "${paths[@]}" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat | cksum
}

# ready_environment FOLDER FINGERPRINT PIP_ARGUMENT...: makes the environment, installs where the
# fingerprint is not that of the last installation, and puts its programs first on the PATH.
ready_environment() {
    local folder=$1 wanted=$2 python
    shift 2
    wanted="$wanted $*"
    # Before anything is made, so that a machine without a compiler is told so at once.
    [ "$(cat "$folder/installed" 2>/dev/null)" = "$wanted" ] || need_compiler
    if [ ! -x "$folder/bin/python" ]; then
        python=$(find_python)
        echo "+ $python -m venv $folder"
        "$python" -m venv "$folder" || {
            rm -rf "$folder"
            die "$python cannot make a virtual environment (Debian, Ubuntu: apt-get install python3-venv)"
        }
    fi
    export VIRTUAL_ENV="$PWD/$folder" PATH="$PWD/$folder/bin:$PATH"
    unset PYTHONPATH PYTHONHOME
    if [ "$(cat "$folder/installed" 2>/dev/null)" != "$wanted" ]; then
        echo "+ pip install $*"
        # Twice quiet: errors are shown, warnings about the machine's package index are not.
        python -m pip install --quiet --quiet --disable-pip-version-check "$@" ||
            die "the installation failed; the lines above say why"
        printf '%s\n' "$wanted" >"$folder/installed"
    fi
}

# What Open MPI asks for before it starts ranks as root (in a container, say).
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
