#!/bin/sh
# The job recipe and the stand-in trainer walked through days drawn from seeds: maintenance, preemption, lost machines,
# resets, killed processes, the runner there or gone, and a cloud whose answers fail. 100 seeds, 10 in the short form
# (CIRANDA_SHORT); CIRANDA_WALKS takes another number, CIRANDA_SEED is the first, CIRANDA_AT_ONCE how many at a time.
exec sh "$(dirname "$0")/kill/private.sh" jobwalk
