# What the tests of packages share; to be sourced, after `name=TOOL` and `suite=SUITE`. A clean Debian is made once below
# target/roots and copied for each test: $root. Whatever ends the test, its daemon and program are ended, what it changed is put
# back, the mounts and the copy are removed.
# shellcheck shell=bash disable=SC2034,SC2154

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
roots=${CARGO_TARGET_DIR:-$source/target}/roots
latency=${CARGO_TARGET_DIR:-$source/target}/release/latency
scratch=
root=
daemon=
program=
clean=(/usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C DEBIAN_FRONTEND=noninteractive)

say() { echo "$name: $*"; }
fail() { echo "$name: FAILED: $*" >&2; exit 1; }
cannot() { echo "$name: $*" >&2; exit 2; }
inside() { chroot "$root" "${clean[@]}" "$@"; }
unmount_below() { # DIRECTORY
    local mount
    # The latest first. With nothing mounted there, grep finds nothing.
    for mount in $(awk '{ print $2 }' /proc/self/mounts | { grep "^$1/" || true; } | tac); do
        umount "$mount" 2> /dev/null || umount -l "$mount" || return 1
    done
}
finish() {
    local status=$?
    trap - EXIT
    trap '' INT TERM HUP
    if [ -n "$daemon" ] && kill "$daemon" 2> /dev/null; then wait "$daemon" 2> /dev/null || true; fi
    if [ -n "$program" ] && kill "$program" 2> /dev/null; then wait "$program" 2> /dev/null || true; fi
    # Nothing is removed through a mount.
    if [ -n "$scratch" ] && unmount_below "$scratch"; then rm -rf "$scratch"; fi
    exit "$status"
}

# A clean Debian of $suite in $root: make_root [PACKAGES-BESIDES-THE-MINIMUM]
make_root() {
    local base=$roots/$suite include=${1:-libgcc-s1}
    [ "$(id -u)" = 0 ] || cannot "a root file system needs root"
    command -v debootstrap > /dev/null || cannot "debootstrap is missing; install it"
    mkdir -p "$roots"
    [ "$include" = libgcc-s1 ] || base=$base-$(echo "$include" | tr ',' '-')
    # One after another where several tests run.
    exec 9> "$roots/lock"
    flock 9
    if [ ! -x "$base/usr/bin/dpkg" ]; then
        say "making a clean Debian $suite (debootstrap)"
        unmount_below "$base.unfinished"
        rm -rf "$base.unfinished"
        debootstrap --variant=minbase --include="$include" "$suite" "$base.unfinished" > "$roots/debootstrap.log" 2>&1 ||
            cannot "debootstrap: $(tail -n 5 "$roots/debootstrap.log")"
        rm -rf "$base.unfinished"/var/cache/apt/archives/*.deb
        mv "$base.unfinished" "$base"
    fi
    exec 9>&-
    scratch=$(mktemp -d "$roots/$name.XXXXXX")
    trap finish EXIT
    trap 'exit 130' INT TERM HUP
    root=$scratch/root
    cp -a "$base" "$root"
    # No /sys of this machine with write access, but where a trial is made; /proc shows this machine's programs.
    mount -t proc -o nosuid,nodev,noexec proc "$root/proc"
    mount -t sysfs -o nosuid,nodev,noexec,ro sysfs "$root/sys"
    files > "$scratch/before"
}

# Every file but those that the kernel and the package managers keep for themselves.
files() {
    (cd "$root" && find . -xdev \( -path ./proc -o -path ./sys -o -path ./var/lib/dpkg -o -path ./var/lib/rpm -o -path ./var/cache \
        -o -path ./var/log -o -path ./tmp -o -path ./root/.rpmdb \) -prune -o -print | LC_ALL=C sort)
}
nothing_left() {
    files > "$scratch/after"
    diff "$scratch/before" "$scratch/after" > "$scratch/left" || fail "left behind, or taken along: $(cat "$scratch/left")"
}

# The daemon of the root, in the background: start_daemon ARGUMENTS
start_daemon() {
    # Not through a function: its process number is that of a shell, which a signal would end instead of the daemon.
    chroot "$root" "${clean[@]}" homeostat run "$@" > "$scratch/daemon.log" 2>&1 &
    daemon=$!
    for _ in $(seq 300); do
        if inside homeostat status > "$scratch/status" 2> /dev/null; then return 0; fi
        kill -0 "$daemon" 2> /dev/null || fail "the daemon ended: $(cat "$scratch/daemon.log")"
        sleep 0.2
    done
    fail "no status within a minute: $(cat "$scratch/daemon.log")"
}
stop_daemon() {
    kill "$daemon"
    wait "$daemon" || fail "the daemon did not end well: $(cat "$scratch/daemon.log")"
    daemon=
}

# Looks and advises for $seconds, of nothing but what needs no breakpoint.
try_advice() {
    say "doctor"
    inside homeostat doctor > "$scratch/doctor" 2> "$scratch/doctor.error" || fail "doctor: $(cat "$scratch/doctor" "$scratch/doctor.error")"
    say "run --advise-only for ${seconds:-10} s"
    start_daemon --advise-only --set meters.breakpoints=false
    head -n 1 "$scratch/status" | grep -q "^homeostat is off: .*--advise-only" || fail "the status does not say that it only advises: $(cat "$scratch/status")"
    sleep "${seconds:-10}"
    inside homeostat status > "$scratch/status" || fail "the daemon does not answer any more: $(cat "$scratch/daemon.log")"
    stop_daemon
    [ -e "$root/var/lib/homeostat/journal" ] || fail "there is no journal"
}

# One trial of large pages on a program of its own: the switch lets the daemon act, kill -9 in the middle of a block is put right by
# restore, a stop undoes. Nothing else is touched: a rule keeps the daemon's hands off all other programs.
large() { awk '/^AnonHugePages:/ { print $2 }' "/proc/$program/smaps_rollup"; }
await_trial() {
    for _ in $(seq 1500); do
        [ -e "/proc/$program/smaps_rollup" ] || fail "the program has ended"
        kill -0 "$daemon" 2> /dev/null || fail "the daemon ended: $(tail -n 20 "$scratch/daemon.log")"
        if [ "$(large)" -gt 0 ]; then return; fi
        sleep 0.2
    done
    fail "no trial of large pages in five minutes: $(tail -n 20 "$scratch/daemon.log")"
}
undone() { # WHEN
    [ "$(large)" = 0 ] || fail "$(large) KiB are still in large pages after $1"
}
try_trial() {
    local attempt
    [ -x "$latency" ] || cannot "$latency is missing; cargo build --release -p homeostat-workloads builds it"
    if grep -q '\[always\]' /sys/kernel/mm/transparent_hugepage/enabled; then
        say "SKIPPED: no trial, since programs get large pages here without asking (transparent_hugepage/enabled is always)"
        return
    fi
    cp "$latency" "$scratch/$name-target"
    mkdir -p "$root/etc/homeostat"
    sed -n '/^\[policy\]/,/^blocks_max/p' "$source/vm/systemd/root/etc/homeostat/homeostat.toml" > "$root/etc/homeostat/homeostat.toml"
    printf '[[policy.workloads]]\nmatch = "%s"\n[[policy.workloads]]\nmatch = "*"\nnever = true\n' "$scratch/$name-target" \
        >> "$root/etc/homeostat/homeostat.toml"
    "$scratch/$name-target" --order random 64 64 1 1800 > /dev/null &
    program=$!
    # Without what the daemon before left, which would count as an earlier version's and begin switched on.
    rm -rf "$root/var/lib/homeostat"
    start_daemon --advise-first
    head -n 1 "$scratch/status" | grep -q "homeostat on" || fail "the first line of the status does not say how to let it act: $(cat "$scratch/status")"
    inside homeostat on > "$scratch/on" || fail "homeostat on: $(cat "$scratch/on")"
    # A block may end between the look and the kill; then nothing is in force, which proves nothing, and it is done again.
    for attempt in 1 2 3; do
        await_trial
        say "kill -9 in a trial ($(large) KiB in large pages)"
        kill -KILL "$daemon"
        wait "$daemon" 2> /dev/null || true
        daemon=
        inside homeostat restore > "$scratch/restored" || fail "restore: $(cat "$scratch/restored")"
        undone restore
        start_daemon --advise-first
        if grep -q "^Restored: [1-9]" "$scratch/restored"; then break; fi
        [ "$attempt" -lt 3 ] || fail "nothing was in force at any of three kills"
    done
}
# Ends what try_trial began, by whatever removes the package: the daemon is not a service here, so it is stopped first.
stop_in_trial() {
    [ -n "$program" ] || return 0
    await_trial
    say "stop in a trial ($(large) KiB in large pages)"
    stop_daemon
    undone "the stop"
}
