#!/bin/bash
# Slurm prolog: a job begins on GPUs that nothing of ours holds. Add it to Prolog= in slurm.conf; it runs as root.
#
# What a crash left behind is put back, as the epilog does; a node is never drained for it, and a job never refused:
# a prolog that fails would do both.

set -u
"$(dirname "$0")/epilog.sh" || logger -t gpuenergyd "prolog of job ${SLURM_JOB_ID:-?}: a GPU could not be put back" || true
exit 0
