// Scores of encoded samples by a compiled package of `pibroch export --aot`, without pibroch.
//
//     score PACKAGE.pt2 INPUTS.pt
//
// INPUTS.pt is what torch.save wrote: a list of the tensors that the package's metadata lists under
// `pibroch.inputs`, in that order. A line a sample: its score, or one for each task.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

std::vector<at::Tensor> read_inputs(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const at::IValue saved = torch::jit::pickle_load(bytes);
  std::vector<at::Tensor> inputs;
  for (const at::IValue& tensor : saved.toListRef()) inputs.push_back(tensor.toTensor());
  return inputs;
}

int main(int argc, char** argv) try {
  if (argc != 3) throw std::runtime_error("usage: score PACKAGE.pt2 INPUTS.pt");
  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  std::fprintf(stderr, "version %s\n", package.get_metadata().at("pibroch.version").c_str());
  const std::vector<at::Tensor> outputs = package.run(read_inputs(argv[2]));  // scores, logits
  const at::Tensor scores = outputs.at(0).reshape({outputs.at(0).size(0), -1}).contiguous();
  const float* score = scores.const_data_ptr<float>();
  for (int64_t sample = 0; sample < scores.size(0); ++sample)
    for (int64_t task = 0; task < scores.size(1); ++task)
      std::printf("%.9g%c", *score++, task + 1 < scores.size(1) ? ',' : '\n');
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
