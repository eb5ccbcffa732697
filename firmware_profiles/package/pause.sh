#!/bin/sh
# Pauses between starts that follow each other: 5, 10, 20, 40, 80, 160, then 300 s. The unit runs it, because systemd
# itself learned this in version 254 only.
#
#   pause before [FILE]    ahead of every start; the first 5 s are the unit's own. A life of ten minutes ends the count.
#   pause stopped [FILE]   after every end; one that was meant ends the count too
#
# Times are seconds since the kernel started: a board's clock jumps when it hears what time it is.
file=${2:-/run/metafleet/starts}
if [ "$1" = stopped ]; then
    [ "${SERVICE_RESULT:-}" != success ] || rm -f "$file"
    exit 0
fi
now() { cut -d. -f1 "${METAFLEET_UPTIME:-/proc/uptime}"; }

count=0 started=
[ ! -r "$file" ] || read -r count started <"$file"
case "x$count$started" in *[!0-9x]*) started= ;; esac
if [ -n "$started" ] && [ "$(($(now) - started))" -lt 600 ]; then count=$((count + 1)); else count=0; fi
pause=5 left=$count
while [ "$left" -gt 1 ] && [ "$pause" -lt 300 ]; do
    pause=$((pause * 2)) left=$((left - 1))
done
[ "$pause" -le 300 ] || pause=300
if [ "$pause" -gt 5 ]; then
    echo "metafleet: ended $count times soon after its start, goes on in $((pause - 5)) s"
    sleep "$((pause - 5))"
fi
echo "$count $(now)" >"$file"
