#!/bin/sh
# Installs what was flashed onto the first partition. Runs at every start until that is done, so that a power cut in
# between costs nothing; then it erases what is secret there, and itself from what is started.
set -eu
SERIAL=@SERIAL@
MOUNTED=/run/metafleet-boot

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
    if ! sh "$boot/metafleet/install.sh" >"$boot/metafleet.log" 2>&1; then
        cat "$boot/metafleet.log"
        sync
        exit 1
    fi
    cat "$boot/metafleet.log"
fi
finish
