// One launch: read from standard input, what it wrote to standard output. builds.py has the other
// side of both.

#include <cstdio>
#include <cstring>
#include <vector>

#include "emulator.h"

namespace {

constexpr uint64_t kAbsent = ~0ull;  // as a size: a null pointer

void read(void* to, size_t bytes) {
  if (std::fread(to, 1, bytes, stdin) != bytes) emulator::fault("the input is too short");
}

uint64_t read_word() {
  uint64_t word;
  read(&word, sizeof word);
  return word;
}

struct Tensor {
  unsigned char* data;
  size_t bytes;
};

}  // namespace

int main() {
  emulator::Launch launch;
  launch.blocks = static_cast<unsigned>(read_word());
  launch.threads = static_cast<unsigned>(read_word());
  launch.ranks = static_cast<unsigned>(read_word());
  launch.shared = read_word();
  launch.lazy = read_word() != 0;
  launch.seed = static_cast<unsigned>(read_word());

  std::vector<uint64_t> words;
  std::vector<Tensor> written;
  for (uint64_t left = read_word(); left > 0; --left) {
    const bool is_written = read_word() != 0;
    const uint64_t bytes = read_word();
    unsigned char* data = nullptr;
    if (bytes != kAbsent) {
      data = emulator::guarded(bytes);
      read(data, bytes);
      emulator::allow(data, bytes);
      if (is_written) written.push_back({data, bytes});
    }
    words.push_back(reinterpret_cast<uint64_t>(data));
  }
  for (uint64_t left = read_word(); left > 0; --left) words.push_back(read_word());

  // Of the address they have which tensor it is, and how far from there.
  std::vector<emulator::TensorMap> maps(read_word());
  for (emulator::TensorMap& map : maps) {
    const uint64_t tensor = read_word();
    if (tensor >= words.size()) emulator::fault("there is no tensor %zu", tensor);
    read(&map, sizeof map);
    map.address += words[tensor];
    words.push_back(reinterpret_cast<uint64_t>(&map));
  }

  emulator::launch(launch, words.data(), words.size());
  for (const Tensor& tensor : written) std::fwrite(tensor.data, 1, tensor.bytes, stdout);
  return 0;
}
