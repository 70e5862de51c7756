// Prints the classes of images: classify model.pt2 images.pt
// model.pt2 is a classifier packaged by AOTInductor, images.pt a tensor stored by torch.save (package.py writes both).

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

at::Tensor load_tensor(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw std::runtime_error("classify: the file " + path + " cannot be opened.");
  }
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  return torch::pickle_load(bytes).toTensor();
}

void print_classes(const std::string& model, const std::string& images) {
  const c10::InferenceMode no_gradients;
  torch::inductor::AOTIModelPackageLoader loader(model);
  const at::Tensor classes = loader.run({load_tensor(images)}).at(0).argmax(1);
  std::cout << "classes:";
  for (int64_t i = 0; i < classes.numel(); ++i) {
    std::cout << ' ' << classes[i].item<int64_t>();
  }
  std::cout << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "classify takes two files. Type: classify model.pt2 images.pt\n";
    return 2;
  }
  try {
    print_classes(argv[1], argv[2]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
