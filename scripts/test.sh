#!/usr/bin/env bash
# Sets everything up (the first time), then lint, types and tests: scripts/test.sh [pytest arguments]
# The last line is "N passed, N failed, N skipped"; each failed check counts as one, and the exit status is 0 if none.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
scripts/setup.sh || exit 1
bin=$PWD/.venv/bin
report=$(mktemp)
trap 'rm -f "$report"' EXIT

failed=0
check() {
  "$@" && return
  echo "failed: $*"
  failed=$((failed + 1))
}
check "$bin/ruff" check --quiet .
check "$bin/ruff" format --quiet --check .
check "$bin/mypy" --no-error-summary fef experiments configs

# Two processes, a whole file in each, because each test file compiles its own programs and few share any.
# The limit only ends what hangs; the suite is meant to take a third of it.
timeout --foreground --kill-after=60 45m \
  "$bin/python" -m pytest -n 2 --dist loadfile --junitxml="$report" "$@"
status=$?

"$bin/python" - "$report" "$status" "$failed" <<'EOF_PYTHON'
import sys
import xml.etree.ElementTree

report, status, failed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    counts = next(xml.etree.ElementTree.parse(report).iter("testsuite")).attrib
except xml.etree.ElementTree.ParseError:  # pytest did not get as far
    counts = {}
tests, skipped = int(counts.get("tests", 0)), int(counts.get("skipped", 0))
bad = int(counts.get("failures", 0)) + int(counts.get("errors", 0))
if status and not bad:
    reasons = {5: "no test was collected", 124: "it took too long"}
    print(f"failed: pytest ended with status {status}" + (f", {reasons[status]}" if status in reasons else ""))
    failed += 1
print(f"{max(tests - bad - skipped, 0)} passed, {bad + failed} failed, {skipped} skipped")
sys.exit(1 if bad + failed else 0)
EOF_PYTHON
