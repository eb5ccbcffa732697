#!/bin/sh
# Installs what was flashed onto the first partition. Runs at every start until that is done, so that a power cut in
# between costs nothing; then it erases what is secret there, and itself from what is started.
set -eu
SERIAL=@SERIAL@
MOUNTED=/run/metafleet-boot
FLEET_KEY='@KEY@'

find_boot() {
    for place in /boot/firmware /boot /boot/efi; do
        if [ -f "$place/metafleet/install.sh" ]; then
            echo "$place"
            return
        fi
    done
    mkdir -p "$MOUNTED"
    if ! mountpoint -q "$MOUNTED"; then mount "UUID=$SERIAL" "$MOUNTED"; fi
    echo "$MOUNTED"
}

# A flash card may keep what was deleted; what can be overwritten is.
erase() {
    if [ -f "$1" ]; then
        size=$(wc -c <"$1")
        dd if=/dev/zero of="$1" bs=1 count="$size" conv=notrunc,fsync 2>/dev/null
        rm -f "$1"
    fi
}

# Nothing of the package runs or is unpacked before this. The archive's hash is in package.env, which is checked here;
# install.sh compares it. The one-time token is not in the list: the fleet's authority has signed it.
check() {
    cd "$boot/metafleet"
    signed || return 1
    sed 1d PACKAGE | sed -n 's/^file \([0-9a-f]*\) /\1  /p' >/run/metafleet-files
    [ -s /run/metafleet-files ] && sha256sum -c --quiet /run/metafleet-files && return
    echo "metafleet: the package is damaged: flash the card again"
    return 1
}

# OpenSSL reads Ed25519 from a file since 3.0 (Debian 12, Ubuntu 22.04).
signed() {
    if ! openssl version 2>/dev/null | grep -q '^OpenSSL [3-9]'; then
        echo "metafleet: there is no OpenSSL 3 here: the hashes of the package are checked, its signature is not"
        return
    fi
    place=$(mktemp -d)
    echo "$FLEET_KEY" >"$place/key"
    sed 1d PACKAGE >"$place/text"
    sed -n 1p PACKAGE | cut -d: -f3 |
        python3 -c 'import sys; sys.stdout.buffer.write(bytes.fromhex(sys.stdin.read()))' >"$place/signature"
    if openssl pkeyutl -verify -pubin -inkey "$place/key" -rawin -in "$place/text" -sigfile "$place/signature"; then
        rm -rf "$place"
        return
    fi
    rm -rf "$place"
    echo "metafleet: the fleet's key has not signed this package: flash the card again, from the fleet's folder"
    return 1
}

finish() {
    erase "$boot/network-config"
    rm -rf "$boot/metafleet"
    if [ -d /etc/cloud ]; then : >/etc/cloud/cloud-init.disabled; fi
    systemctl disable metafleet-first-boot.service
    sync
    if mountpoint -q "$MOUNTED"; then umount "$MOUNTED"; fi
}

boot=$(find_boot)
if [ -f "$boot/metafleet/install.sh" ]; then
    if [ ! -w "$boot" ]; then mount -o remount,rw "$boot"; fi
    if ! { (check) && sh "$boot/metafleet/install.sh"; } >"$boot/metafleet.log" 2>&1; then
        cat "$boot/metafleet.log"
        sync
        exit 1
    fi
    cat "$boot/metafleet.log"
fi
finish
