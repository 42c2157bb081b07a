#!/bin/bash
# Slurm epilog: writes the energy of a finished job into its AdminComment, which `sacct --format=JobID,AdminComment%60`
# shows. Add it to Epilog= in slurm.conf, after epilog.sh; it runs as root and needs slurmdbd.
#
# The first node of the job writes. It counts the hosts in its history: all of them if the history is shared, else itself.
#
# GPUENERGYD_PREFIX: installation prefix. The exit status is always 0: a comment is no reason to drain a node.

set -u
prefix=${GPUENERGYD_PREFIX:-/opt/gpuenergyd}
[ -x "$prefix/bin/gpuenergyd" ] && [ -n "${SLURM_JOB_ID:-}" ] || exit 0
first=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2>/dev/null | head -n 1)
[ "$first" = "${SLURMD_NODENAME:-$(hostname -s)}" ] || exit 0

since=$(date -u -d "@${SLURM_JOB_START_TIME:-0}" +%Y-%m-%dT%H:%MZ)
# The daemon writes what it has read of the job within a second of its end.
sleep "${GPUENERGYD_COMMENT_DELAY_S:-2}"
comment=$(timeout 20 "$prefix/bin/gpuenergyd" report --since "$since" --group-by tag --tag slurm_job_id --json 2>/dev/null |
    "$prefix/bin/python" -I -c '
import json, sys
for row in json.load(sys.stdin)["groups"]:
    if row["group"] == sys.argv[1]:
        used_j, saved_j = (row["energy_j"] or 0) + (row["estimated_j"] or 0), row["saved_energy_j"]
        saved = "" if saved_j is None else f" saved_kwh={saved_j / 3.6e6:.6f}"
        print(f"energy_kwh={used_j / 3.6e6:.6f}{saved} source=gpuenergyd")
' "$SLURM_JOB_ID" 2>/dev/null)
[ -n "$comment" ] || exit 0
timeout 10 sacctmgr -i modify job where "jobid=$SLURM_JOB_ID" set "AdminComment=$comment" >/dev/null 2>&1 ||
    logger -t gpuenergyd "job $SLURM_JOB_ID: the comment was not written: $comment" || true
exit 0
