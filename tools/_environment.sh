# Functions for Python and virtual environments. Scripts in this folder source it from the repository root.

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# no_arguments "$@": ends a script that takes no arguments if it got some, such as --help.
no_arguments() {
    [ $# -eq 0 ] || die "expected no arguments, got: $*; the top of the script says what it does"
}

# Prints the command of a Python that is new enough: $PYTHON, or the first one on the PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python; do
        # Run it: a version manager may have a shim for a Python that is not installed.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.11 or newer"
    done
    die "no Python 3.11 or newer on the PATH; install one, or set PYTHON=/path/to/python3"
}

# The build needs a C++17 compiler; CMake and MPI come as wheels.
need_compiler() {
    local compiler=${CXX:-c++}
    command -v "${compiler%% *}" >/dev/null ||
        die "no C++ compiler ($compiler): install g++ (Debian, Ubuntu: apt-get install g++) or set CXX"
}

# Prints a line that changes with the contents of the files and folders given.
fingerprint() {
    local paths=("$@")
    find "${paths[@]}" -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 cat | cksum
}

# Prints what a project, such as `.[test,dev]`, requires, one a line.
requirements() {
    python - "$1" <<'END'
import sys, tomllib
folder, _, extras = sys.argv[1].rstrip("]").partition("[")
project = tomllib.load(open(f"{folder}/pyproject.toml", "rb"))["project"]
optional = project["optional-dependencies"]
print(*project["dependencies"], *(r for e in extras.split(",") for r in optional[e]), sep="\n")
END
}

# ready_environment FOLDER FINGERPRINT [PIP_OPTION...] PROJECT: makes the environment, installs if the
# fingerprint or the arguments have changed since the last installation, and puts its programs first
# on the PATH.
ready_environment() {
    local folder=$1 wanted=$2 python
    shift 2
    wanted="$wanted $*"
    # Report a missing compiler before anything is made.
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
        # Quiet twice: show errors, but not warnings about the package index.
        local pip=(python -m pip install --quiet --quiet --disable-pip-version-check)
        local project=${!#} options=("${@:1:$#-1}") failed=
        local others=("${options[@]}")
        [ $# -eq 1 ] || [ "${others[-1]}" != -e ] || unset 'others[-1]'
        # At once: by itself pip downloads, compiles and unpacks one after the other, each for a minute.
        "${pip[@]}" "${options[@]}" "${project%%\[*}" --no-deps &
        requirements "$project" >"$folder/requirements.txt" &&
            "${pip[@]}" "${others[@]}" -r "$folder/requirements.txt" || failed=1
        wait $! && [ -z "$failed" ] || die "the installation failed; the lines above say why"
        printf '%s\n' "$wanted" >"$folder/installed"
    fi
}

# Open MPI needs these to start ranks as root, as in a container.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
