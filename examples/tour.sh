#!/usr/bin/env bash
# Runs the README's grpcurl lines as they stand against a broker of its own, and fails if one of them
# does. Needs `make build bin/tools/grpcurl`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/bin:$PWD/bin/tools:$PATH"

dir=$(mktemp -d /tmp/berth-tour-XXXXXX)
export SOCKET=$dir/b.sock
berthd --state "$dir/state" --run "$dir/run" --listen "unix://$SOCKET" --provider local >"$dir/ready" 2>"$dir/log" &
broker=$!
finish() {
	status=$?
	kill -TERM "$broker" 2>/dev/null || true
	wait "$broker" || status=$?
	[ "$status" = 0 ] || cat "$dir/log" >&2
	rm -rf "$dir"
	exit "$status"
}
trap finish EXIT
for _ in $(seq 100); do
	grep -q ready "$dir/ready" && break
	sleep 0.1
done

# Each line of the README's block, in order.
ran=0
while IFS= read -r line; do
	printf '$ %s\n' "$line"
	answer=$(eval "$line")
	printf '%s\n' "$answer"
	case "$line" in
	*CreateSandbox*) export SANDBOX=$(sed -n 's/^    "id": "\(sb_[^"]*\)",$/\1/p' <<<"$answer" | head -n 1) ;;
	*RunCommand*) grep -q '"text": "Linux\\n"' <<<"$answer" && grep -q '"exitCode": 3' <<<"$answer" ;;
	*StartJob*) export JOB=$(sed -n 's/^    "id": "\(job_[^"]*\)",$/\1/p' <<<"$answer" | head -n 1) ;;
	*PollJob*) grep -q '"JOB_STATE_DONE"' <<<"$answer" && grep -q '"exitCode": 0' <<<"$answer" ;;
	*DestroySandbox*) grep -q '"SANDBOX_STATE_DESTROYED"' <<<"$answer" ;;
	*Health*) grep -q SERVING <<<"$answer" ;;
	esac
	ran=$((ran + 1))
done < <(sed -n '/^### With grpcurl/,/^### /p' README.md | sed -n '/^```sh$/,/^```$/p' | grep '^grpcurl')
[ "$ran" -ge 7 ] || { echo "the README has only $ran grpcurl lines" >&2; exit 1; }
echo "the README's $ran grpcurl lines do what it says"
