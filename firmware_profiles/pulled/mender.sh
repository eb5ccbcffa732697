#!/bin/sh
# A Mender Update Module (protocol v3) for Metafleet's programs: STATE FOLDER. Link it as
# /usr/share/mender/modules/v3/metafleet-agent; the artifact's files are those of "metafleet updates save".
# Install checks the fleet's signature, changes over, and waits until the new agent has reached its broker; commit keeps
# it, rollback goes back. Without a commit the device goes back by itself.
set -eu
UPDATE=${METAFLEET_UPDATE:-/opt/metafleet/current/bin/update}
case ${1:-} in
NeedsArtifactReboot) echo No ;;
SupportsRollback) echo Yes ;;
ArtifactInstall) exec /bin/sh "$UPDATE" install "${2:?no folder}/files" ;;
ArtifactCommit) exec /bin/sh "$UPDATE" commit ;;
ArtifactRollback | ArtifactFailure) exec /bin/sh "$UPDATE" undo ;;
*) ;; # Download, Cleanup, and states that are not known yet: nothing to do, which is success
esac
