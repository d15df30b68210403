# Shared by the scripts: sourced, never run. Messages go to standard error.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# The interpreter to build with: $PYTHON, else the first of 3.11 to 3.13 that is there.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 to 3.13 was found; name one in PYTHON"
}

# Builds go through ccache where it is there, and clones share what they compiled.
use_ccache() {
  command -v ccache >/dev/null || return 0
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
}

# Creates and prints the directory of this user for what clones share under the name $1, or else one of this clone.
user_cache() {
  local cache=${XDG_CACHE_HOME:-$HOME/.cache}/sglang-tpusync/$1
  mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || { cache=$PWD/.cache/$1; mkdir -p "$cache"; }
  printf '%s\n' "$cache"
}
