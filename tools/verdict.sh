#!/bin/sh
# What gotestsum runs after every run of tests: prints how many passed, failed and were skipped, and
# fails when that was nothing. Where a suite was asked for, every package named has to run a test.
# $GOTESTSUM_JSONFILE holds the lines of `go test -json`, and is removed.
set -eu
events=$GOTESTSUM_JSONFILE
trap 'rm -f "$events"' EXIT

count() { grep -c "\"Action\":\"$1\",.*\"Test\":" "$events" || true; }
passed=$(count pass)
# With what gotestsum counts as failed beside tests: a package that did not compile, or died.
failed=$((TESTS_FAILED + TESTS_ERRORS))
printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$(count skip)"

if [ "$failed" -eq 0 ] && [ "$passed" -eq 0 ]; then
	echo "no test ran" >&2
	exit 1
fi
if [ -n "${BERTH_RUN:-}" ] && [ "$BERTH_RUN" != night ] && grep -E 'testing: warning: no tests to run|\[no test files\]' "$events" >&2; then
	echo "a package of $BERTH_RUN ran no test" >&2
	exit 1
fi
