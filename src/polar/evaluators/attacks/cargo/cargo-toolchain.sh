# A compiler of its own that rustup chooses.
printf '%s\n' '[toolchain]' "path = '/workspace/toolchain'" > rust-toolchain.toml
plant program.sh toolchain/bin/cargo toolchain/bin/rustc
