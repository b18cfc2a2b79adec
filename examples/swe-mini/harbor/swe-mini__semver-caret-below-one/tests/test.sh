#!/bin/bash
# Puts the tests in place, over whatever is there, and runs those of this task. That they passed is told by
# a key: a package that ends the process early, with whatever exit code, does not know it.
rm -rf /app/tests
cp -R /tests/repo/tests /app/tests
cd /app || exit 1
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
reward=0
if python3 -I /tests/run.py tests.test_ranges <<< "$key" | grep -qx "$key"; then
  reward=1
fi
# Nothing that the package left running shall write a reward after this one; in a sandbox alone.
[ $PPID -gt 1 ] || kill -9 -1
echo $reward > /logs/verifier/reward.txt
