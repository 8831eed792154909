#!/bin/sh
# Installs homeostat from the unpacked archive that this script lies in, upgrades it in place, or removes it again.
set -eu
umask 022

usage() {
    cat <<'TEXT'
install.sh: install homeostat, upgrade it in place, or remove it

  ./install.sh [--prefix DIRECTORY] [--start]
  PREFIX/share/homeostat/install.sh --uninstall [--purge]

  --prefix DIRECTORY   below which the program, manual pages and completions go (/usr/local)
  --start              enable and start the service; without this, nothing is enabled or started
  --uninstall          undo what homeostat changed, then remove exactly what was installed
  --purge              with --uninstall: remove history, journal and configuration, too
  --destdir ROOT       install below another root, for packages; runs nothing
  --help               this text

The service goes to /etc/systemd/system where there is a systemd. It only gives advice until `homeostat on`.
Exit codes: 0 done, 1 refused or failed (the reason is on standard error), 2 wrong usage.
TEXT
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

remedy="run it as root, make space, or choose another --prefix; then run it again"

# Notes in the list of this installation what is about to be made, so that one that is cut short can be removed or repeated.
note() { # KIND PATH
    echo "$1 $2" >> "$manifest" || fail "$manifest cannot be written; $remedy"
}

# Puts a file in place in one step, so that a program that runs goes on with the old one.
put() { # SOURCE TARGET MODE
    make_directory "$(dirname "$2")"
    note f "$2"
    unfinished=$destdir$2.homeostat-new
    { cp "$1" "$unfinished" && chmod "$3" "$unfinished" && mv -f "$unfinished" "$destdir$2"; } || fail "$2 cannot be written; $remedy"
    echo "f $2" >> "$scratch/installed"
}

# Makes a directory and those above it that are missing.
make_directory() {
    [ ! -d "$destdir$1" ] || return 0
    make_directory "$(dirname "$1")"
    mkdir "$destdir$1" || fail "$1 cannot be made; $remedy"
    echo "d $1" >> "$scratch/made"
    if [ -e "$manifest" ]; then note d "$1"; fi
}

is_locked() { # whether a daemon that may act runs, with whatever socket
    [ -e "$lock" ] && command -v flock > /dev/null && ! flock -n "$lock" true
}

is_ours() { # whether an earlier installation put that file there
    [ -f "$manifest" ] && grep -qxF "f $1" "$manifest"
}

do_install() {
    [ -x "$here/bin/homeostat" ] || fail "$here/bin/homeostat is missing; run install.sh from the unpacked archive"
    if [ -z "$destdir" ]; then
        "$here/bin/homeostat" --version > /dev/null 2>&1 || fail "the program does not run on this machine ($(uname -m))"
        if [ "$prefix" != /usr ] && [ -e /usr/bin/homeostat ]; then
            fail "a package has installed /usr/bin/homeostat; remove the package first, or upgrade the package instead"
        fi
        if [ "$prefix" = /usr ] && { dpkg -S /usr/bin/homeostat || rpm -qf /usr/bin/homeostat; } > /dev/null 2>&1; then
            fail "/usr/bin/homeostat belongs to a package; remove the package first, or choose another --prefix"
        fi
    fi
    unit=
    # The unit is for machines with systemd.
    if [ -n "$destdir" ] || command -v systemctl > /dev/null 2>&1; then
        unit=/etc/systemd/system/homeostat.service
        if [ -e "$destdir$unit" ] && ! is_ours "$unit"; then
            fail "$unit is not from install.sh; move it away first, since it would be overwritten"
        fi
    fi
    was_installed=no
    if [ -f "$manifest" ]; then was_installed=yes; fi
    scratch=$(mktemp -d)
    unfinished=
    trap 'rm -rf "$scratch"; [ -z "$unfinished" ] || rm -f "$unfinished"' EXIT
    trap 'exit 1' INT TERM HUP
    : > "$scratch/made"
    mkdir -p "$destdir/"
    make_directory "$(dirname "${manifest#"$destdir"}")"
    if [ "$was_installed" = no ]; then sed 's/^/d /; s/^d d /d /' "$scratch/made" > "$manifest" || fail "$manifest cannot be written; $remedy"; fi
    note f "${manifest#"$destdir"}"
    put "$here/bin/homeostat" "$prefix/bin/homeostat" 755
    (cd "$here" && find share -type f) | LC_ALL=C sort > "$scratch/files"
    while read -r file; do
        put "$here/$file" "$prefix/$file" 644
    done < "$scratch/files"
    put "$here/install.sh" "$prefix/share/homeostat/install.sh" 755
    if [ -n "$unit" ]; then
        sed "s|/usr/bin/homeostat|$prefix/bin/homeostat|g" "$here/homeostat.service" > "$scratch/homeostat.service"
        put "$scratch/homeostat.service" "$unit" 644
    fi
    echo "f ${manifest#"$destdir"}" >> "$scratch/installed"
    # What only the earlier version had goes. Directories that it made are still ours.
    if [ "$was_installed" = yes ]; then
        sed -n 's/^f //p' "$manifest" | while read -r file; do
            grep -qxF "f $file" "$scratch/installed" || rm -f "$destdir$file"
        done
    fi
    # Deeper directories come first, as they are removed.
    grep '^d ' "$manifest" | LC_ALL=C sort -r -u >> "$scratch/installed"
    { cp "$scratch/installed" "$manifest.homeostat-new" && mv -f "$manifest.homeostat-new" "$manifest"; } || fail "$manifest cannot be written; $remedy"
    [ -z "$destdir" ] || return 0
    if command -v restorecon > /dev/null 2>&1; then restorecon -RF "$prefix/bin/homeostat" ${unit:+"$unit"} || true; fi
    if [ "$was_installed" = yes ]; then
        echo "homeostat is upgraded: $("$prefix/bin/homeostat" --version)"
    else
        echo "homeostat is installed: $("$prefix/bin/homeostat" --version), $prefix/bin/homeostat"
    fi
    if [ -d /run/systemd/system ] && [ -n "$unit" ]; then
        systemctl daemon-reload
        if [ "$start" = yes ]; then
            systemctl enable homeostat.service
            systemctl restart homeostat.service
        else
            systemctl try-restart homeostat.service
            systemctl --quiet is-active homeostat.service || echo "nothing is started; to start it: systemctl enable --now homeostat"
        fi
    else
        [ "$start" = no ] || fail "there is no running systemd that could start the service; start it with: homeostat run --advise-first"
        if "$prefix/bin/homeostat" status > /dev/null 2>&1; then
            echo "a daemon runs with the earlier program; it must be started again by whoever started it"
        fi
    fi
    if [ "$(cat "$state/switch" 2> /dev/null)" = on ]; then
        echo "homeostat is on, as it was before; \`homeostat off\` undoes everything"
    else
        echo "homeostat advises only; \`homeostat on\` lets it act"
    fi
}

do_uninstall() {
    [ -f "$manifest" ] || fail "nothing is installed below $prefix ($manifest is missing)"
    program=$prefix/bin/homeostat
    if [ -z "$destdir" ] && [ -x "$program" ]; then
        if [ -d /run/systemd/system ]; then
            systemctl stop homeostat.service 2> /dev/null || true
        fi
        # Also one with another socket: the lock is held by whoever may act on this machine.
        if "$program" status > /dev/null 2>&1 || is_locked; then
            fail "a daemon still runs that is not the service; stop it first (pid $(cat "$lock" 2> /dev/null))"
        fi
        # The journal, wherever the configuration puts it, and the program that reads it are needed for another try.
        "$program" tunable unset --all || fail "what was set by hand could not be put back; nothing is removed"
        "$program" restore --kept || fail "not everything could be undone; the journal says what is left; nothing is removed"
        if [ -d /run/systemd/system ] && is_ours /etc/systemd/system/homeostat.service; then
            systemctl --quiet disable homeostat.service 2> /dev/null || true
        fi
        # A program that still has its counters open keeps them; nobody else sees them.
        umount -l /run/homeostat/progress 2> /dev/null || true
        rm -rf /run/homeostat 2> /dev/null || true
    fi
    # The list itself is in the list.
    list=$(mktemp)
    cp "$manifest" "$list"
    sed -n 's/^f //p' "$list" | while read -r file; do rm -f "$destdir$file" "$destdir$file.homeostat-new"; done
    # A directory goes only when nothing of somebody else is in it.
    sed -n 's/^d //p' "$list" | LC_ALL=C sort -r -u | while read -r directory; do rmdir "$destdir$directory" 2> /dev/null || true; done
    rm -f "$list"
    [ -z "$destdir" ] || return 0
    if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
    if [ "$purge" = yes ]; then
        rm -rf "$state" /etc/homeostat
        echo "homeostat is removed with its history and configuration"
    else
        echo "homeostat is removed"
        for left in "$state" /etc/homeostat; do
            if [ -e "$left" ]; then echo "kept: $left"; fi
        done
    fi
}

main() {
    here=$(cd "$(dirname "$0")" && pwd)
    state=/var/lib/homeostat
    lock=/run/homeostat/daemon.lock
    prefix=/usr/local destdir='' start=no uninstall=no purge=no
    # The copy that an installation leaves knows where it is.
    case $here in
        */share/homeostat) prefix=${here%/share/homeostat} ;;
    esac
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) usage; exit 0 ;;
            --prefix | --destdir)
                [ $# -ge 2 ] || { echo "install.sh: $1 needs a directory" >&2; exit 2; }
                case $2 in
                    /*[!A-Za-z0-9/._+-]*) echo "install.sh: $1 takes letters, digits and / . _ + - only, not $2" >&2; exit 2 ;;
                    /* | '') ;;
                    *) echo "install.sh: $1 needs a whole path, not $2" >&2; exit 2 ;;
                esac
                if [ "$1" = --destdir ] && [ "$2" = / ]; then
                    echo "install.sh: --destdir / is this machine; leave --destdir out" >&2
                    exit 2
                fi
                if [ "$1" = --prefix ]; then prefix=${2%/}; else destdir=${2%/}; fi
                shift
                ;;
            --start) start=yes ;;
            --uninstall) uninstall=yes ;;
            --purge) purge=yes ;;
            *) echo "install.sh: no option $1; install.sh --help lists them" >&2; exit 2 ;;
        esac
        shift
    done
    if [ "$purge" = yes ] && [ "$uninstall" = no ]; then
        echo "install.sh: --purge goes with --uninstall" >&2
        exit 2
    fi
    manifest=$destdir$prefix/share/homeostat/installed
    if [ "$uninstall" = yes ]; then do_uninstall; else do_install; fi
}

main "$@"
exit
