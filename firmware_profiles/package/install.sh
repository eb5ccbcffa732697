#!/bin/sh
# Installs the package in this folder on the system that it runs on. No network, no pip: python3 is all that it needs.
#
#   sh install.sh [--no-start]      as root; again after a power cut, it goes on
#
# program.tar.gz  to /opt/metafleet/VERSION, with the link "current"
# etc/            to /etc/metafleet, and a link to each in the agent's home
# home/           to /var/lib/metafleet, readable by the agent alone; overwritten and deleted here afterwards
set -eu
umask 022
cd "$(dirname "$0")"
# What is different from package to package: VERSION PYTHON ARCH SHA256 GROUPS_WANTED
. ./package.env
ROOT=${METAFLEET_ROOT:-}
USER=metafleet
START=yes
if [ "${1:-}" = --no-start ]; then START=no; fi

say() { echo "metafleet: $*"; }
fail() { echo "metafleet: $*" >&2; exit 1; }

# Whole or not at all: FILE TO MODE OWNER
put() {
    cp "$1" "$2.new"
    if [ -z "$ROOT" ]; then chown "$4" "$2.new"; fi
    chmod "$3" "$2.new"
    sync "$2.new"
    mv -f "$2.new" "$2"
}

# A flash card may keep what was deleted; what can be overwritten is.
erase() {
    if [ -f "$1" ]; then
        size=$(wc -c <"$1")
        dd if=/dev/zero of="$1" bs=1 count="$size" conv=notrunc,fsync 2>/dev/null
        rm -f "$1"
    fi
}

check_system() {
    found=$(python3 -c 'import struct, sys; print("%d.%d %d" % (*sys.version_info[:2], 8 * struct.calcsize("P")))') ||
        fail "there is no python3 on this system"
    [ "$found" = "$PYTHON 64" ] || fail "the package is for 64-bit Python $PYTHON, this system has $found-bit"
    [ "$(uname -m)" = "$ARCH" ] || fail "the package is for $ARCH, this system is $(uname -m)"
}

make_user() {
    if ! id "$USER" >/dev/null 2>&1; then
        useradd --system --user-group --home-dir /var/lib/metafleet --no-create-home --shell /usr/sbin/nologin "$USER"
    fi
    for group in $GROUPS_WANTED; do
        if getent group "$group" >/dev/null; then usermod -a -G "$group" "$USER"; fi
    done
}

put_program() {
    programs=$ROOT/opt/metafleet
    if [ -d "$programs/$VERSION" ]; then return; fi
    archive=program.tar.gz
    if [ ! -f "$archive" ]; then archive=$ROOT/opt/metafleet-program.tar.gz; fi
    [ -f "$archive" ] || fail "program.tar.gz is not here"
    echo "$SHA256  $archive" | sha256sum -c - >/dev/null 2>&1 || fail "$archive is damaged: flash again"
    say "unpacking $VERSION"
    rm -rf "$programs/.new"
    mkdir -p "$programs/.new"
    tar -xzf "$archive" -C "$programs/.new" --no-same-owner
    for file in PACKAGE MANIFEST.sha256; do cp "$file" "$programs/.new/$VERSION/"; done
    sync
    mv "$programs/.new/$VERSION" "$programs/$VERSION"
    rm -rf "$programs/.new"
    rm -f "$ROOT/opt/metafleet-program.tar.gz"
}

put_settings() {
    mkdir -p "$ROOT/etc/metafleet" "$ROOT/var/lib/metafleet" "$ROOT/etc/systemd/system"
    if [ -z "$ROOT" ]; then chown "$USER:$USER" /var/lib/metafleet; fi
    chmod 0700 "$ROOT/var/lib/metafleet"
    for file in etc/*; do
        [ -f "$file" ] || continue
        name=$(basename "$file")
        put "$file" "$ROOT/etc/metafleet/$name" 0640 "root:$USER"
        own=$ROOT/var/lib/metafleet/$name  # enrolment puts a file of the device's own in place of a link
        if [ -L "$own" ] || [ ! -e "$own" ]; then ln -sfn "/etc/metafleet/$name" "$own"; fi
    done
    for file in home/*; do
        [ -f "$file" ] || continue
        put "$file" "$ROOT/var/lib/metafleet/$(basename "$file")" 0600 "$USER:$USER"
    done
    for unit in metafleet*.service metafleet*.path; do
        put "$unit" "$ROOT/etc/systemd/system/$unit" 0644 root:root
    done
}

switch() {
    ln -sfn "$VERSION" "$ROOT/opt/metafleet/current.new"
    mv -fT "$ROOT/opt/metafleet/current.new" "$ROOT/opt/metafleet/current"
    sync
}

start() {
    if [ -n "$ROOT" ]; then return; fi
    systemctl daemon-reload
    systemctl enable metafleet.service metafleet-update.path
    if [ "$START" = yes ]; then systemctl restart --no-block metafleet.service metafleet-update.path; fi
}

if [ -z "$ROOT" ]; then
    [ "$(id -u)" = 0 ] || fail "must be run by root"
    check_system
    make_user
fi
put_program
put_settings
switch
for file in home/*; do erase "$file"; done
sync
start
say "$VERSION is installed"
