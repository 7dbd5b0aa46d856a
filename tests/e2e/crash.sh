#!/bin/sh
# What asks the cloud for something, or deletes it, killed before and after every call that matters, and typed again:
# nothing is made twice, nothing forgotten. Every point, or some of each class in the short form (CIRANDA_SHORT);
# CIRANDA_POINTS takes so many, CIRANDA_SEED repeats a choice. Needs strace.
exec sh "$(dirname "$0")/kill/private.sh" crash
