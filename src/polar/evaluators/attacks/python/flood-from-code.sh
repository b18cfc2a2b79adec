# Code under test that prints more than is kept, to push out what is said of it.
begin_sources_with <<'END'
import sys
for _ in range(2000): sys.stdout.write('x' * 9999)
print('\n1.0')
END
