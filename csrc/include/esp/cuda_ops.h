// The CUDA kernels' launches, on a cudaStream_t of the current device. They throw std::runtime_error.
#pragma once
#include "esp/advance_block.h"
#include "esp/commit_kv.h"

namespace esp {

void advance_block_cuda(const AdvanceBlockArgs& args, void* stream);
void commit_kv_cuda(const CommitKvArgs& args, void* stream);

}  // namespace esp
