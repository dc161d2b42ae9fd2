#!/usr/bin/env bash
# Makes the image that the API suite's docker machines are made of, under the name that it is given: a
# small Debian with bash, git and procps, and a git repository in /srv/repo. Needs root, debootstrap and
# a Docker engine; takes a minute.
set -euo pipefail
name=${1:?usage: conformance/image.sh NAME}

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=bash,git,procps stable "$root" >"$root.log" 2>&1 || {
	tail -n 20 "$root.log" >&2
	rm -f "$root.log"
	exit 1
}
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* "$root"/usr/share/{doc,man,locale}

repo=$root/srv/repo
git init -q -b trunk "$repo"
git -C "$repo" config user.name Test
git -C "$repo" config user.email test@example.invalid
git -C "$repo" commit -q --allow-empty -m first
git -C "$repo" tag v1
echo hello >"$repo/README"
git -C "$repo" add .
git -C "$repo" commit -q -m second
git -C "$repo" branch side
chown -R 0:0 "$repo"

tar -C "$root" -c . | docker import --change 'ENV LANG=C.UTF-8' --change 'CMD ["/bin/bash"]' - "$name" >/dev/null
