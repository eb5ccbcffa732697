#!/bin/sh
# Installs a program that the device has fetched, beside the one that runs, and goes back if the new agent does not come
# up connected. As root, without an operator; what flashing over SSH does step by step is done here at once, by the same
# functions of device.sh.
#
#   update.sh pull             what the agent has put in $AGENT/update: started by metafleet-update.path
#   update.sh install FOLDER   a folder with the same files: PACKAGE, prepare, program.tar.gz, the units
#   update.sh commit           after "install": the new program stays, if its agent is connected
#   update.sh undo             after "install": back to the program before
#
# Nothing in the folder is believed: it is copied, and the copy checked by the key /etc/metafleet/fleet.pub and by hashes.
# Exit codes are those of device.sh; 8 the new agent did not come up connected.
set -eu
HERE=$(dirname "$(readlink -f "$0")")
DO=${1:-}
[ $# -eq 0 ] || shift
ARGUMENT=${1:-} SECONDS_ARMED=${2:-0}
set -- library
# shellcheck source=/dev/null
. "$HERE/device.sh"
PATIENCE_S=${METAFLEET_PATIENCE_S:-300}
COMMIT_S=${METAFLEET_COMMIT_S:-900}
GOT=$FLASH/got
FROM=$AGENT/update
UNIT_NAMES="metafleet.service metafleet-update.service metafleet-update.path"
MOST_BYTES=65536

# In the agent's folder, reads and removes with the agent's rights alone, so that a link there leads nowhere.
theirs() {
    if [ -n "$TOP" ]; then "$@"; else setpriv --reuid=metafleet --regid=metafleet --clear-groups -- "$@"; fi
}

# A copy that is root's own: NAME BYTES, of at most that many.
get() {
    if [ "$FROM" = "$AGENT/update" ]; then
        theirs head -c "$(($2 + 1))" "$FROM/$1" >"$GOT/$1"
    else
        head -c "$(($2 + 1))" "$FROM/$1" >"$GOT/$1"
    fi
    [ "$(wc -c <"$GOT/$1")" -le "$2" ] || unsigned "$1 has more than $2 bytes"
}

field() { sed -n "s/^$1 //p" "$FLASH/program.text"; }

online() { theirs head -c 4096 "$AGENT/online.json" 2>/dev/null | tr -d '\n' || :; }

# The program in $FROM is on the disk, armed and started. A process of its own, so that any error ends it.
install_program() {
    begin_here
    rm -rf "$GOT"
    mkdir -m 700 "$GOT"
    [ -e "$KEY" ] || unsigned "there is no key of a fleet here: $KEY"
    get PACKAGE "$MOST_BYTES"
    signed program <"$GOT/PACKAGE"
    fits
    VERSION=$(field version)
    if [ "$(current)" = "$VERSION" ]; then
        remember
        answer running ""
        return
    fi
    archive=$(field archive)
    placed "$VERSION" || get program.tar.gz "${archive#* }"
    for name in prepare $UNIT_NAMES; do
        grep -q "^file [0-9a-f]\{64\} $name\$" "$FLASH/program.text" || continue
        get "$name" "$MOST_BYTES"
        as_signed "$GOT/$name" program "file HASH $name"
    done
    placed "$VERSION" || unpack "$VERSION"
    place "$VERSION" <"$GOT/prepare"
    units
    online >"$FLASH/before"
    rm -rf "$GOT"
    arm "$VERSION" "$RUN" "$1"
    flip "$VERSION"
}

# The scripts that the rollback calls are those of the program that runs now; an armed run of somebody else is left alone.
begin_here() {
    mkdir -p "$FLASH"
    chmod 700 "$FLASH"
    if [ -e "$FLASH/back" ]; then back "finished by the next run"; fi
    [ ! -e "$FLASH/armed" ] || exit 6
    [ "$HERE" = "$FLASH" ] || { cp "$HERE/device.sh" "$FLASH/device.sh.new" && mv "$FLASH/device.sh.new" "$FLASH/device.sh"; }
    echo "$RUN" >"$FLASH/owner"
}

fits() {
    [ "$(field arch)" = "$(uname -m)" ] || unsigned "it is for $(field arch), this machine is $(uname -m)"
    python=$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ "$(field python)" = "$python" ] || unsigned "it is for Python $(field python), this system has $python"
}

placed() {
    [ "$(sum_of "$ROOT/$1/$MANIFEST")" = "$(field manifest)" ] && (cd "$ROOT/$1" && sha256sum -c --quiet "$MANIFEST" >/dev/null 2>&1)
}

# What the archive holds is what the manifest that was signed lists, and nothing else. Files that the running version has
# too are linked.
unpack() {
    as_signed "$GOT/program.tar.gz" program "archive HASH"
    part=$ROOT/.$1.part
    rm -rf "$part"
    mkdir -p "$part"
    tar -x -z --no-same-owner --strip-components=1 -f "$GOT/program.tar.gz" -C "$part"
    rm -f "$GOT/program.tar.gz"
    cd "$part"
    [ -z "$(find . ! -type d ! -type f | head -n 1)" ] || unsigned "the program holds more than files and folders"
    find . -type f -printf '%P\n' | sort | xargs -r -d '\n' sha256sum >"$FLASH/manifest"
    as_signed "$FLASH/manifest" program "manifest HASH"
    mv "$FLASH/manifest" "$MANIFEST"
    cp "$FLASH/program.signed" PACKAGE
    if [ -e "$ROOT/current/" ]; then
        (cd "$ROOT/current/" && sha256sum -c "$part/$MANIFEST" 2>/dev/null | sed -n 's/: OK$//p') >"$FLASH/same" || :
        (cd "$ROOT/current/" && xargs -r -d '\n' cp -l --remove-destination --parents -t "$part" --) <"$FLASH/same"
    fi
}

# The units that differ are the settings that change over with the program.
units() {
    rm -rf "$FLASH/settings"
    (umask 077 && mkdir -p "$FLASH/settings")
    mkdir -p "$FLASH/settings/etc/systemd/system"
    for name in $UNIT_NAMES; do
        [ -e "$GOT/$name" ] || continue
        cmp -s "$GOT/$name" "$UNITS/$name" || cp "$GOT/$name" "$FLASH/settings/etc/systemd/system/$name"
    done
}

# Whether the agent of the armed version has reached its broker, within SECONDS.
returned() {
    left=$1
    wanted="\"version\": \"$(told "$FLASH/armed/version")\""
    while [ -e "$FLASH/armed" ]; do
        now=$(online)
        case $now in
        *"$wanted"*) if [ "$now" != "$(told "$FLASH/before")" ] && [ "$(active)" = active ]; then return 0; fi ;;
        esac
        [ "$left" -gt 0 ] || return 1
        sleep 1
        left=$((left - 1))
    done
    return 1
}

# With the lock. An error of the step that installs leaves the version before, and nothing armed.
run_pull() {
    asked=$(theirs head -c 64 "$FROM/ready" 2>/dev/null || :)
    theirs rm -f "$FROM/ready" # it is asked for once; without an answer the agent asks again
    case $asked in *[!0-9\ ]* | "") return 0 ;; esac
    [ ! -e "$FLASH/armed" ] || return 0
    ! answered "$asked" || return 0
    mkdir -p "$FLASH"
    printf 'serial=%s\nattempt=%s\n' "${asked% *}" "${asked#* }" >"$FLASH/asked"
    code=0
    RUN=$RUN /bin/sh "$HERE/$(basename "$0")" locked-install "$FROM" "$((PATIENCE_S + 60))" 2>"$FLASH/why" || code=$?
    settle "$code"
    [ ! -e "$FLASH/armed" ] || if returned "$PATIENCE_S"; then confirm "$RUN"; else
        back "its agent did not reach its broker within $PATIENCE_S s"
    fi
}

# Whether this serial and attempt has its answer: the agent asked again meanwhile.
answered() { [ "$(sed -n '1,2s/^[a-z]*=//p' "$ROOT/update-result" 2>/dev/null | tr '\n' ' ')" = "$1 " ]; }

# What has failed is told and leaves nothing behind: CODE.
settle() {
    [ "$1" -ne 0 ] || return 0
    said=$(sed -n '1s/^error: //p; 1q' "$FLASH/why")
    said=${said:-$(sed -n 1p "$FLASH/why")}
    said=${said:-exit code $1}
    rm -rf "$GOT" "$ROOT"/.*.part
    if [ -e "$FLASH/armed" ]; then back "changing over failed: $said"; else answer refused "$said"; fi
}

run_install() {
    FROM=$1
    if [ ! -e "$FLASH/armed" ]; then
        rm -f "$FLASH/asked"
        echo "$RUN" >"$FLASH/installed"
    fi
    code=0
    RUN=$RUN /bin/sh "$HERE/$(basename "$0")" locked-install "$1" "$((PATIENCE_S + COMMIT_S))" 2>"$FLASH/why" || code=$?
    cat "$FLASH/why" >&2
    [ "$code" -ne 6 ] || exit 6
    settle "$code"
    [ "$code" -eq 0 ] || exit "$code"
    [ -e "$FLASH/armed" ] || return 0
    returned "$PATIENCE_S" && return 0
    back "its agent did not reach its broker within $PATIENCE_S s"
    exit 8
}

# What "install" armed, not what somebody else did.
ours() { [ -e "$FLASH/armed" ] && [ "$(told "$FLASH/armed/run")" = "$(told "$FLASH/installed")" ]; }

# A program that ran already, or was committed before, stays.
run_commit() {
    if ours; then
        returned 0 || exit 8
        confirm "$(told "$FLASH/armed/run")"
    else
        [ "$(current)" = "$(field version)" ] || exit 8
    fi
}

run_undo() { if ours || [ -e "$FLASH/back" ]; then back "undone"; fi; }

with_lock() {
    mkdir -p "$FLASH"
    chmod 700 "$FLASH"
    exec flock -o "$FLASH/lock" /bin/sh "$HERE/$(basename "$0")" "locked-$1" "$ARGUMENT"
}

case $DO in
pull | commit | undo) with_lock "run-$DO" ;;
install) [ -d "$ARGUMENT" ] || { echo "there is no folder $ARGUMENT" >&2; exit 64; }; with_lock run-install ;;
locked-run-*)
    RUN=$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')
    "run_${DO#locked-run-}" "$ARGUMENT" ;;
locked-install) FROM=$ARGUMENT; install_program "$SECONDS_ARMED" ;;
*) echo "no such verb: $DO" >&2; exit 64 ;;
esac
