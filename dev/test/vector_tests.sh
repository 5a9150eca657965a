# vector_tests.sh -- the tests of what uses vectors (llmc/base/vec.h); for `source`. They run once for each kind of processor.
# shellcheck shell=bash disable=SC2034
vector_tests=(test_vec test_matmul test_attention test_encoder test_layernorm test_gelu test_classifier test_adamw test_bpe test_gpt2)
