#!/bin/sh
# What flashing over SSH does on the device, one verb a call, as root. POSIX sh and coreutils, findutils, util-linux, tar.
#
#   /opt/metafleet/VERSION        a version: the files of its MANIFEST.sha256, and .ready once it was set up
#   /opt/metafleet/current        link to the version that runs
#   /opt/metafleet/.VERSION.part  a version that is being uploaded
#   /opt/metafleet/.flash         this script, and:
#     serial     of the newest program that was confirmed here; one that was signed before it is refused
#     asked      serial and attempt of what update.sh installs; /opt/metafleet/update-result says what came of it
#     owner      the run at work; an earlier one that comes back is refused
#     program.text, settings.text   what the fleet's key has signed
#     settings   files that are to be put below /: configuration, the unit; kept until it is over
#     armed      version, previous, run, and those files as they were: the device returns to them unless "confirm"
#                comes in time. It is made and taken by renaming, whole: back while it returns, done when it is over.
#
# Exit codes: 3 the version is there with other content, 4 there is nothing armed, 5 another run has taken over,
# 6 another run is at work, 7 it is not what the fleet's key has signed. Everything else is an error of a command, with its message.
set -eu
export LC_ALL=C
umask 022
TOP=${METAFLEET_ROOT:-}
ROOT=$TOP/opt/metafleet UNITS=$TOP/etc/systemd/system AGENT=$TOP/var/lib/metafleet CACHE=$TOP/var/cache/metafleet
FLASH=$ROOT/.flash
UNIT=metafleet.service GUARD=metafleet-return.service
MANIFEST=MANIFEST.sha256
KEY=$TOP/etc/metafleet/fleet.pub

say() { printf '%s=%s\n' "$1" "$2"; }
told() { [ ! -e "$1" ] || cat "$1"; }
current() { readlink "$ROOT/current" 2>/dev/null || :; }
active() { systemctl is-active "$UNIT" 2>/dev/null || :; }

# What the machine is; writes nothing and needs no root.
machine() {
    say arch "$(uname -m)"
    say bits "$(getconf LONG_BIT 2>/dev/null || :)"
    say glibc "$(getconf GNU_LIBC_VERSION 2>/dev/null || :)"
    say python "$(python3 --version 2>&1 || :)"
    say root "$(id -u)"
    missing=
    for program in systemctl tar sha256sum flock setsid readlink xargs; do
        command -v "$program" >/dev/null || missing="$missing $program"
    done
    say missing "$missing"
}

# What is there; writes nothing.
facts() {
    folder=$ROOT
    [ -d "$folder" ] || folder=/opt
    [ -d "$folder" ] || folder=/
    say free_kib "$(df -Pk "$folder" | awk 'NR == 2 { print $4 }')"
    health
    say armed "$(told "$FLASH/armed/version")"
    say last_return "$(told "$FLASH/last-return")"
    for manifest in "$ROOT"/*/"$MANIFEST"; do
        version=$(basename "$(dirname "$manifest")")
        [ ! -f "$manifest" ] || [ "$version" = current ] || say "version $version" "$(sum_of "$manifest")"
        [ ! -e "$ROOT/$version/.ready" ] || say "ready $version" yes
    done
    for path in /etc/metafleet/* "$UNITS/$UNIT" "$UNITS"/metafleet-update.* "$AGENT/device.toml" "$AGENT/enrol.token"; do
        [ ! -f "$path" ] || say "file $path" "$(sum_of "$path")"
    done
    # The device.toml that the agent made its own when it enrolled; before that it is a link.
    [ -L "$AGENT/device.toml" ] || told "$AGENT/device.toml" | sed 's/^/own=/'
}

sum_of() { [ ! -e "$1" ] || sha256sum <"$1" | cut -c1-64; }

# RUN owns the device from now on; an earlier one that was cut off is refused if it comes back.
begin() {
    if [ -e "$FLASH/back" ]; then back "finished by the next run"; fi
    rm -f "$FLASH/asked"
    echo "$1" >"$FLASH/owner"
}

owned() { [ "$(told "$FLASH/owner")" = "$1" ] || exit 5; }

# Standard input: what the fleet's key has signed, of the program or the settings. The agent that is already there checks
# it with the key that is already there. On the first flash there is neither: who has this connection is believed, and the
# key comes with the settings.
signed() {
    rm -f "$FLASH/$1.text"
    cat >"$FLASH/$1.signed"
    if [ ! -e "$KEY" ]; then
        sed 1d "$FLASH/$1.signed" >"$FLASH/$1.checked"
    elif ! [ -x "$ROOT/current/bin/edge-agent" ]; then
        unsigned "there is a key, and no agent that could check with it"
    elif ! PYTHONDONTWRITEBYTECODE=1 "$ROOT/current/bin/edge-agent" verify --key "$KEY" "$FLASH/$1.signed" >"$FLASH/$1.checked"; then
        unsigned "the agent that runs there did not find it signed"
    fi
    [ "$(sed -n 1p "$FLASH/$1.checked")" = "metafleet $1 1" ] || unsigned "the signed text is not about the $1"
    [ "$1" != program ] || not_older "$FLASH/program.checked"
    mv "$FLASH/$1.checked" "$FLASH/$1.text"
}

unsigned() { echo "$1" >&2; exit 7; }

# A program that was signed before the newest one here is refused, unless its signature says that it may be older.
not_older() {
    least=$(newest)
    given=$(serial_in "$1")
    [ "${given:-0}" -ge "${least:-0}" ] || grep -qx "older yes" "$1" ||
        unsigned "it was signed before what was installed here: serial ${given:-0}, at least $least is needed"
}

newest() { if [ -e "$FLASH/serial" ]; then cat "$FLASH/serial"; else serial_in "$ROOT/current/PACKAGE"; fi; }
serial_in() { [ ! -e "$1" ] || sed -n 's/^serial \([1-9][0-9]\{0,15\}\)$/\1/p' "$1"; }

# The program that was confirmed is the newest from now on.
remember() {
    grep -qxF "version $(current)" "$FLASH/program.text" 2>/dev/null || return 0
    given=$(serial_in "$FLASH/program.text")
    least=$(newest)
    [ "${given:-0}" -ge "${least:-0}" ] || return 0
    echo "$given" >"$FLASH/serial.new"
    mv "$FLASH/serial.new" "$FLASH/serial"
}

# What came of an update that was pulled, for the agent: OUTCOME WHY. Nothing where no such update is at work.
answer() {
    [ -e "$FLASH/asked" ] || return 0
    { cat "$FLASH/asked"; say outcome "$1"; say why "$(printf %s "$2" | head -c 400 | tr '\n' ' ')"; } >"$ROOT/.update-result.new"
    sync "$ROOT/.update-result.new"
    mv "$ROOT/.update-result.new" "$ROOT/update-result"
    sync -f "$ROOT"
    rm -f "$FLASH/asked"
}

# That FILE has the hash that was signed: FILE KIND LINE, as in "file HASH NAME".
as_signed() {
    [ -e "$FLASH/$2.text" ] || unsigned "nothing is signed"
    grep -q "^$(echo "$3" | sed "s/HASH/$(sum_of "$1")/")\( \|\$\)" "$FLASH/$2.text" ||
        unsigned "$(basename "$1") is not what was signed"
}

# Standard input: the manifest. Out: the files that are still to be sent. What the running version has is linked; a
# version that is there already, from a card, needs its manifest only.
want() {
    part=$ROOT/.$1.part
    cat >"$FLASH/manifest"
    as_signed "$FLASH/manifest" program "manifest HASH"
    grep -qxF "version $1" "$FLASH/program.text" || unsigned "another version than $1 is signed"
    if [ -d "$ROOT/$1" ] && (cd "$ROOT/$1" && sha256sum -c "$FLASH/manifest" >/dev/null 2>&1); then
        mv "$FLASH/manifest" "$ROOT/$1/$MANIFEST"
        cp "$FLASH/program.signed" "$ROOT/$1/PACKAGE"
        rm -rf "$part"
        return
    fi
    mkdir -p "$part"
    cd "$part"
    mv "$FLASH/manifest" "$MANIFEST"
    cp "$FLASH/program.signed" PACKAGE
    names | sort >"$FLASH/names"
    find . ! -type d ! -path "./$MANIFEST" ! -path ./PACKAGE | cut -c3- | sort | comm -23 - "$FLASH/names" >"$FLASH/extra"
    while IFS= read -r name; do rm -f -- "$name"; done <"$FLASH/extra"
    wrong | sort >"$FLASH/wrong"
    if [ -e "$ROOT/current/" ]; then
        (cd "$ROOT/current/" && sha256sum -c "$part/$MANIFEST" 2>/dev/null | sed -n 's/: OK$//p' | sort) |
            comm -12 - "$FLASH/wrong" >"$FLASH/same"
        # One program for all of them: torch has ten thousand files, and a process for each takes a board minutes.
        (cd "$ROOT/current/" && xargs -r -d '\n' cp -l --remove-destination --parents -t "$part" --) <"$FLASH/same"
        wrong | sort >"$FLASH/wrong"
    fi
    cat "$FLASH/wrong"
}

names() { sed -n 's/^[0-9a-f]\{64\}  //p' "$MANIFEST"; }
wrong() { sha256sum -c "$MANIFEST" 2>/dev/null | sed -n 's/: FAILED.*$//p'; }

# Standard input: a .tar.gz of files. They replace what was linked, never write through it.
take() { tar -x -z -p --no-same-owner --unlink-first -f - -C "$ROOT/.$1.part"; }

# The uploaded version gets its name, once every file of it is right and on the disk; then it is set up.
# Standard input: what it needs of the system (its user, its folders), as a script.
place() {
    cat >"$FLASH/prepare"
    as_signed "$FLASH/prepare" program "file HASH prepare"
    [ ! -e "$ROOT/.$1.part" ] || named "$1"
    rm -f "$ROOT/$1/.ready"
    [ -n "$TOP" ] || /bin/sh -eu "$FLASH/prepare" </dev/null >&2
    : >"$ROOT/$1/.ready"
}

named() {
    cd "$ROOT/.$1.part"
    sha256sum -c --quiet "$MANIFEST" >&2
    sync -f "$ROOT"
    cd "$ROOT"
    if [ -e "$1" ]; then
        [ "$(current)" != "$1" ] || exit 3
        rm -rf ".$1.old.part"
        mv "$1" ".$1.old.part"
    fi
    mv ".$1.part" "$1"
    rm -rf ".$1.old.part"
}

# The new version is the one that runs, with the settings of standard input, a tar by their paths from / on: VERSION
# RUN SECONDS. Before anything is touched the way back is armed.
change() {
    rm -rf "$FLASH/settings" "$FLASH/settings.new"
    mkdir -m 700 "$FLASH/settings.new"
    (umask 077 && cat >"$FLASH/settings.tar")
    as_signed "$FLASH/settings.tar" settings "sha256 HASH"
    grep -qxF "run $2" "$FLASH/settings.text" || unsigned "the settings of another run are signed"
    tar -x -p -f "$FLASH/settings.tar" -C "$FLASH/settings.new"
    rm -f "$FLASH/settings.tar"
    mv "$FLASH/settings.new" "$FLASH/settings"
    arm "$@"
    flip "$1"
}

# From now on the device returns to what it is, unless "confirm" comes within SECONDS: VERSION RUN SECONDS.
arm() {
    rm -rf "$FLASH/arming"
    mkdir -m 700 "$FLASH/arming" "$FLASH/arming/files"
    echo "$1" >"$FLASH/arming/version"
    echo "$2" >"$FLASH/arming/run"
    current >"$FLASH/arming/previous"
    changed >"$FLASH/arming/changed"
    while IFS= read -r path; do
        [ ! -e "$TOP/$path" ] || (cd "$TOP/" && cp -a --parents "$path" "$FLASH/arming/files/")
    done <"$FLASH/arming/changed"
    guard
    sync -f "$ROOT"
    mv -T "$FLASH/arming" "$FLASH/armed"
    sync -f "$ROOT"
    watch "$2" "$3"
}

changed() { (cd "$FLASH/settings" && find . -type f | cut -c3-); }

# An earlier run changed over and was cut off; this one goes on with it: VERSION RUN SECONDS.
again() {
    [ -e "$FLASH/armed" ] || exit 4
    echo "$2" >"$FLASH/armed/run"
    watch "$2" "$3"
    flip "$1"
}

# Where the device starts anew while armed, it returns at once.
guard() {
    cat >"$UNITS/$GUARD" <<EOF
[Unit]
Description=Metafleet: return to the version before, when the new one was not confirmed
ConditionPathExists=|$FLASH/armed
ConditionPathExists=|$FLASH/back
RequiresMountsFor=$ROOT
Before=$UNIT

[Service]
Type=oneshot
ExecStart=/bin/sh $FLASH/device.sh boot

[Install]
WantedBy=multi-user.target
EOF
    systemctl daemon-reload
    systemctl enable "$GUARD" >/dev/null 2>&1
}

# A timer of systemd where there is one, else a process that stays: RUN SECONDS.
watch() {
    systemd-run --quiet --collect --unit="metafleet-return-$1" --on-active="$2" --timer-property=AccuracySec=1s \
        /bin/sh "$FLASH/device.sh" fire "$1" 2>/dev/null && return
    setsid /bin/sh "$FLASH/device.sh" linger "$1" "$2" </dev/null >/dev/null 2>&1 &
}

# There is nothing to return to any more: RUN.
unwatch() { systemctl stop "metafleet-return-$1.timer" >/dev/null 2>&1 || :; }

linger() {
    left=$2
    while [ "$left" -gt 0 ]; do
        [ "$(told "$FLASH/armed/run")" = "$1" ] || exit 0
        sleep 1
        left=$((left - 1))
    done
    exec /bin/sh "$FLASH/device.sh" fire "$1"
}

fire() {
    [ "$(told "$FLASH/armed/run")" = "$1" ] || exit 0
    back "nobody confirmed it in time"
}

boot() { back "the device was started anew before it was confirmed"; }

# Settings are replaced one by one, each whole; then the link.
flip() {
    while IFS= read -r path; do put "$FLASH/settings/$path" "$TOP/$path"; done <"$FLASH/armed/changed"
    link "$1"
    run
}

put() {
    mkdir -p "$(dirname "$2")"
    cp -a "$1" "$2.metafleet-new"
    mv "$2.metafleet-new" "$2"
}

link() {
    ln -sfn "$1" "$ROOT/.current.new"
    mv -T "$ROOT/.current.new" "$ROOT/current"
    sync -f "$ROOT"
}

run() {
    systemctl daemon-reload
    systemctl enable "$UNIT" >/dev/null 2>&1
    [ ! -e "$UNITS/metafleet-update.path" ] || systemctl enable --now metafleet-update.path >/dev/null 2>&1 || :
    systemctl reset-failed "$UNIT" >/dev/null 2>&1 || :
    rm -f "$TOP/run/metafleet/starts" # it does not pay for how often the one before it ended
    systemctl restart --no-block "$UNIT"
}

# Everything as it was before "arm". Cut off, it is done again at the next start or by the next run.
back() {
    [ -e "$FLASH/back" ] || mv -T "$FLASH/armed" "$FLASH/back" 2>/dev/null || exit 4
    previous=$(told "$FLASH/back/previous")
    [ -n "$previous" ] || systemctl disable --now metafleet-update.path >/dev/null 2>&1 || :
    while IFS= read -r path; do
        if [ -e "$FLASH/back/files/$path" ]; then put "$FLASH/back/files/$path" "$TOP/$path"; else rm -f "$TOP/$path"; fi
    done <"$FLASH/back/changed"
    if [ -n "$previous" ]; then
        link "$previous"
        run
    else
        systemctl disable "$UNIT" >/dev/null 2>&1 || :
        systemctl stop "$UNIT" >/dev/null 2>&1 || :
        systemctl daemon-reload
        rm -f "$ROOT/current"
    fi
    echo "$(told "$FLASH/back/version") to ${previous:-nothing}, $(date -u +%Y-%m-%dT%H:%M:%SZ): $1" >"$FLASH/last-return"
    sync -f "$ROOT"
    answer back "$1"
    unwatch "$(told "$FLASH/back/run")"
    rm -rf "$FLASH/done"
    mv -T "$FLASH/back" "$FLASH/done"
    rm -rf "$FLASH/done" "$FLASH/settings"
}

# What the agent says of itself; writes nothing.
health() {
    say current "$(current)"
    say active "$(active)"
    say online "$(told "$AGENT/online.json" | head -c 4096 | tr -d '\n')"
}

# The new version stays; of the others the one before it and one more.
confirm() {
    [ -e "$FLASH/armed" ] || exit 4
    remember
    rm -rf "$FLASH/done"
    mv -T "$FLASH/armed" "$FLASH/done"
    answer running ""
    unwatch "$1"
    previous=$(told "$FLASH/done/previous")
    rm -rf "$FLASH/done" "$FLASH/settings" "$FLASH/last-return" "$ROOT"/.*.part
    cd "$ROOT"
    kept=0
    # shellcheck disable=SC2012 # names of versions have no blanks
    for version in $previous $(ls -1t); do
        if [ ! -d "$version" ] || [ -L "$version" ] || [ "$version" = "$(current)" ]; then continue; fi
        if [ "$version" = "$previous" ] && [ "$kept" -gt 0 ]; then continue; fi
        kept=$((kept + 1))
        [ "$kept" -le 2 ] || rm -rf "./$version"
    done
    forget
}

# What Python has compiled of versions that are gone: the unit has it put there, and for torch it is a lot.
forget() {
    for folder in "$CACHE/opt/metafleet"/*; do
        [ -d "$ROOT/${folder##*/}" ] || rm -rf "$folder"
    done
}

# A run waits for another one's step, but not for long; the way back waits for as long as it takes.
locked() {
    case $1 in
    fire | boot) exec flock -o "$FLASH/lock" /bin/sh "$0" has-lock "$@" ;;
    *) exec flock -w 30 -E 6 -o "$FLASH/lock" /bin/sh "$0" has-lock "$@" ;;
    esac
}

verb=$1
shift
case $verb in
library) ;; # update.sh uses what is above
machine | facts | health) "$verb" "$@" </dev/null ;;
linger) linger "$@" ;;
begin | fire | boot | signed | want | take | place | change | again | back | confirm) locked "$verb" "$@" ;;
has-lock)
    verb=$1
    case $verb in
    begin | fire | boot) shift; "$verb" "$@" ;;
    *) owned "$2"; shift 2; "$verb" "$@" ;;
    esac ;;
*) echo "no such verb: $verb" >&2; exit 64 ;;
esac
