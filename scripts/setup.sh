#!/usr/bin/env bash
# Makes .venv, installs fef with its dependencies into it and builds the native code, unless that is done already.
# Called by train.sh and test.sh. Safe when several run at once, and after one that was interrupted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
venv=$root/.venv
state=$venv/fef-setup # the key of what has been set up, or "unfinished"

say() { echo "setup: $*" >&2; }
die() {
  say "$@"
  exit 1
}

# Hash of all that the set-up depends on. The place counts, because .venv holds absolute paths.
current_key() {
  local version
  version=$("$venv/bin/python" -VV 2>/dev/null) || return 0
  { echo "$root $version" && cat setup.cfg pyproject.toml scripts/setup.sh fef/native/*.{cc,h,py} fef/native/ucx/*; } | sha256sum
}

is_done() { [[ -s $state && -f fef/native/lib/libfef.so && $(<"$state") == "$(current_key)" ]]; }

find_python() {
  local name
  for name in python3 python3.11 python3.12 python3.13; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "needs Python 3.11 or newer and finds $(python3 -V 2>/dev/null || echo none);" \
    "on Debian or Ubuntu: apt-get install python3 python3-venv"
}

# $CXX, which may hold flags, or the first known compiler that takes C++17.
find_compiler() {
  local name names=(g++ clang++ c++)
  local program=$'#include <optional>\nint main() { return std::optional<int>(0).value(); }'
  [[ -z ${CXX:-} ]] || names=("$CXX")
  for name in "${names[@]}"; do
    # shellcheck disable=SC2086
    if $name -std=c++17 -x c++ -fsyntax-only - <<<"$program" 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "needs a C++17 compiler and finds none (tried ${names[*]}); on Debian or Ubuntu: apt-get install g++"
}

is_usable_venv() {
  [[ -x $venv/bin/python && $(cat "$state" 2>/dev/null) != unfinished ]] &&
    "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

set_up() {
  local python
  python=$(find_python)
  CXX=$(find_compiler)
  export CXX
  if ! is_usable_venv; then
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      die "$python lacks the venv module; on Debian or Ubuntu: apt-get install python3-venv"
    say "making .venv with $("$python" -V)"
    rm -rf "$venv"
    mkdir "$venv"
    echo unfinished >"$state"
    "$python" -m venv "$venv"
  fi
  echo unfinished >"$state"
  say "installing fef and its dependencies into .venv (a minute or two)"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input --progress-bar off -e '.[test]' ||
    die "pip could not install them; the reason is above"
  say "building the native code"
  "$venv/bin/python" -m fef.native.build >/dev/null
  current_key >"$state"
}

is_done && exit
exec 9<scripts/setup.sh
flock --nonblock 9 || {
  say "waiting for another set-up of this folder to end"
  flock 9
}
is_done || set_up
