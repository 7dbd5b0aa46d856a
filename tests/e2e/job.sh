#!/bin/sh
# A job with nobody watching, through maintenance, the loss of a machine, a reset: tests/e2e/job.
# The last line is JSON: {"e2e":"job","passed":N,"failed":N}.
exec sh "$(dirname "$0")/../walk_of_specs.sh" job
