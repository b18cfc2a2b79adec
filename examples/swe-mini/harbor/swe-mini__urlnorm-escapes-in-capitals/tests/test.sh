#!/bin/bash
# Puts the tests in place, over whatever is there, and runs those of this task.
rm -rf /app/tests
cp -R /tests/repo/tests /app/tests
cd /app || exit 1
if python3 -I /tests/run.py tests.test_normal; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
