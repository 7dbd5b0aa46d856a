#!/bin/sh
# Google's guides, typed as they say: recovery from failures in a Multislice environment, and Autocheckpoint on one TPU VM
# and on several slices. The training programs are stand-ins with the guides' own command lines: tests/e2e/guides.
# The short form (CIRANDA_SHORT) has two of the four cases.
# The last line is JSON: {"e2e":"guides","passed":N,"failed":N}.
exec sh "$(dirname "$0")/../walk_of_specs.sh" guides
