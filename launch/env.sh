# Sourced, not run: `source launch/env.sh` creates or reuses the Python environment and activates it (bash).
#
# The environment lies outside the clone, under $MEGATRON_SAO_HOME (default: the user's cache folder), and is keyed by
# the pinned list of packages, so that a second clone with the same list installs nothing. To use an environment of your
# own (a container on GPU nodes, say) set MEGATRON_SAO_PYTHON to its python.

sao_say() { printf '[env] %s\n' "$*" >&2; }

sao_is_supported() { "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

# Prints a Python 3.12 or 3.13: from PATH, then pyenv, then uv.
sao_find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 python; do
        candidate=$(command -v "$candidate") && sao_is_supported "$candidate" && { echo "$candidate"; return; }
    done
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23].*/bin/python; do
        [ -x "$candidate" ] && sao_is_supported "$candidate" && { echo "$candidate"; return; }
    done
    if command -v uv >/dev/null; then
        uv python install --quiet 3.12 && uv python find 3.12 && return
    fi
    sao_say "no Python 3.12 or 3.13 on PATH, in pyenv or through uv; install one and try again"
    return 1
}

# Installs the pinned list into the folder $1. A file "complete" marks a finished environment; without it, start over.
sao_install() {
    local folder=$1 python log=$1.log
    python=$(sao_find_python) || return 1
    sao_say "installing packages into $folder with $python (once for this list; log: $log)"
    rm -rf "$folder" &&
        "$python" -m venv "$folder" >"$log" 2>&1 &&
        "$folder/bin/python" -m pip install --quiet uv==0.13.9 >>"$log" 2>&1 &&
        "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps \
            --requirement "$sao_root/launch/requirements-cpu.txt" >>"$log" 2>&1 &&
        touch "$folder/complete" && return
    sao_say "the installation failed; the end of $log:"
    tail -n 5 "$log" >&2
    return 1
}

# Installs Megatron-Bridge, the judge of tests/models/test_against_bridge.py, into a folder that only that test looks
# into: it asks for an older antlr4 than other packages.
sao_install_bridge() {
    local folder=$1
    rm -rf "$folder.partial" &&
        "$(dirname "$folder")/bin/uv" pip install --quiet --no-deps --python "$(dirname "$folder")/bin/python" \
            --target "$folder.partial" --requirement "$sao_root/launch/requirements-bridge.txt" &&
        mv "$folder.partial" "$folder"
}

sao_activate() {
    local home=${MEGATRON_SAO_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron_sao} key folder
    mkdir -p "$home" || return 1
    if [ -n "${MEGATRON_SAO_PYTHON:-}" ]; then
        folder=$(dirname "$(dirname "$MEGATRON_SAO_PYTHON")")
        if ! sao_is_supported "$folder/bin/python"; then
            sao_say "MEGATRON_SAO_PYTHON = $MEGATRON_SAO_PYTHON is not FOLDER/bin/python of a Python 3.12 or 3.13"
            return 1
        fi
    else
        key=$(sha256sum <"$sao_root/launch/requirements-cpu.txt" | cut -c1-12)
        folder=$home/env-$key
        if [ ! -e "$folder/complete" ]; then # one installer at a time; who waited finds it done
            (flock --wait 900 9 && { [ -e "$folder/complete" ] || sao_install "$folder"; }) 9>"$home/install.lock" ||
                return 1
        fi
        if [ ! -e "$folder/bridge" ]; then
            (flock --wait 900 9 && { [ -e "$folder/bridge" ] || sao_install_bridge "$folder/bridge"; }) \
                9>"$home/install.lock" >>"$folder.log" 2>&1 || sao_say "no Megatron-Bridge: its test will be skipped"
        fi
    fi
    sao_say "using the environment $folder"
    export VIRTUAL_ENV=$folder PATH=$folder/bin:$PATH
    export PYTHONPATH=$sao_root${PYTHONPATH:+:$PYTHONPATH}
    unset PYTHONDONTWRITEBYTECODE # without compiled files each process spends 15-30 s more on imports
    export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$home/pyc}
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
    export HF_HUB_DISABLE_PROGRESS_BARS=${HF_HUB_DISABLE_PROGRESS_BARS:-1} # of each file of a model; ours say more
    hash -r
}

sao_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
sao_activate
