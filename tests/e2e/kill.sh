#!/bin/sh
# The runner killed in many places, and taken up again: nothing is forgotten, run twice, lost or doubled. 200 places, 20
# in the short form (CIRANDA_SHORT); CIRANDA_KILLS takes another number, CIRANDA_SEED repeats a day. Needs strace.
exec sh "$(dirname "$0")/kill/private.sh" kill
