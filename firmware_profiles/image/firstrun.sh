#!/bin/sh
# The first start of Raspberry Pi OS Bookworm: systemd.run in cmdline.txt names this file. It leaves a service that
# installs the agent at the next start, and goes. A step that fails does not keep the others from being done.
set +e
BOOT=/boot/firmware

put() { # FILE MODE, content on stdin
    mkdir -p "$(dirname "$1")"
    (umask 077 && cat >"$1.new")
    chmod "$2" "$1.new"
    mv -f "$1.new" "$1"
}

@STEPS@
# A function, so that the shell has read it before the file that it stands in is overwritten.
finish() {
    sync
    size=$(wc -c <"$BOOT/firstrun.sh")
    dd if=/dev/zero of="$BOOT/firstrun.sh" bs=1 count="$size" conv=notrunc,fsync 2>/dev/null
    rm -f "$BOOT/firstrun.sh"
    sed -i 's| systemd\.run.*||' "$BOOT/cmdline.txt"
    sync
    exit 0
}
finish
