// Stands in for the kernels' header of this name: products that happen when they are started, or
// when they are waited for, with the sums of mma.cuh.
#pragma once

#include "mma.cuh"

namespace rlbench {

struct Matrix {
  unsigned low;

  Matrix(unsigned shared, unsigned panel_stride) : low(panel_stride >> 4 << 16 | (shared & 0x3ffff) >> 4) {}

  unsigned long long descriptor(unsigned bytes) const {
    return 1ull << 62 | (1024ull >> 4) << 32 | (low + (bytes >> 4));
  }
};

// What a descriptor says, in bytes.
struct Descriptor {
  unsigned begin, panel_stride, group_stride;

  explicit Descriptor(unsigned long long bits)
      : begin((bits & 0x3fff) << 4),
        panel_stride((bits >> 16 & 0x3fff) << 4),
        group_stride((bits >> 32 & 0x3fff) << 4) {}

  // The element in a row of 128 bytes. The swizzle is a function of the address.
  template <class Element>
  float at(unsigned row, unsigned column) const {
    const unsigned address = begin + row / 8 * group_stride + row % 8 * 128 + 2 * column;
    return Element::value(half_at(address ^ (address >> 7 & 7) << 4));
  }
};

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }

template <int kPending>
void wgmma_wait() {
  emulator::wait_products(kPending);
}

template <class T>
void keep_order(T&) {}
template <int kTiles>
void forget(float (&tiles)[kTiles][4]) {
  for (auto& tile : tiles) {
    for (float& value : tile) value = kNan;
  }
}

template <class Element, int kTiles>
struct Wgmma {
  static void scores(float (&acc)[kTiles][4], unsigned long long a, unsigned long long b,
                     int accumulate) {
    emulator::Product product = {multiply, &acc[0][0], a, b, {}, accumulate != 0};
    emulator::start_product(product);
  }

  static void values(float (&acc)[kTiles][4], const unsigned (&a)[4], unsigned long long b,
                     int accumulate) {
    start(multiply_rows, acc, a, b, accumulate);
  }

  static void row_scores(float (&acc)[kTiles][4], const unsigned (&a)[4], unsigned long long b,
                         int accumulate) {
    start(multiply_rows_by_rows, acc, a, b, accumulate);
  }

 private:
  // A in registers.
  static void start(void (*run)(const emulator::Product&), float (&acc)[kTiles][4],
                    const unsigned (&a)[4], unsigned long long b, int accumulate) {
    const emulator::Words* words = emulator::exchange("wgmma", {{a[0], a[1], a[2], a[3]}});
    emulator::Product product = {run, &acc[0][0], 0, b, {}, accumulate != 0};
    for (int lower = 0; lower < 2; ++lower) {
      for (int k = 0; k < 16; ++k) {
        product.rows[lower][k] =
            fragment_value<Element>(words, threadIdx.x % 32 / 4, k, k / 8 * 2 + lower);
      }
    }
    emulator::start_product(product);
  }

  // A and B K-major in shared memory.
  static void multiply(const emulator::Product& product) {
    const Descriptor a(product.a), b(product.b);
    const unsigned row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float rows[2][16];
    for (unsigned k = 0; k < 16; ++k) {
      rows[0][k] = a.at<Element>(row, k);
      rows[1][k] = a.at<Element>(row + 8, k);
    }
    add(product, rows, [&](unsigned k, unsigned column) { return b.at<Element>(column, k); });
  }

  // A in registers, B MN-major in panels of 64 columns.
  static void multiply_rows(const emulator::Product& product) {
    Descriptor b(product.b);
    const unsigned begin = b.begin;
    add(product, product.rows, [&](unsigned k, unsigned column) {
      b.begin = begin + column / 64 * b.panel_stride;
      return b.at<Element>(k, column % 64);
    });
  }

  // A in registers, B K-major.
  static void multiply_rows_by_rows(const emulator::Product& product) {
    const Descriptor b(product.b);
    add(product, product.rows, [&](unsigned k, unsigned column) { return b.at<Element>(column, k); });
  }

  template <class B>
  static void add(const emulator::Product& product, const float (&rows)[2][16], const B& b) {
    for (unsigned i = 0; i < kTiles * 2; ++i) {
      const unsigned column = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
      double sums[2] = {};
      for (unsigned k = 0; k < 16; ++k) {
        const double right = b(k, column);
        sums[0] += rows[0][k] * right;
        sums[1] += rows[1][k] * right;
      }
      for (unsigned lower = 0; lower < 2; ++lower) {
        float& acc = product.acc[i / 2 * 4 + lower * 2 + i % 2];
        acc = static_cast<float>((product.accumulate ? acc : 0.0f) + sums[lower]);
      }
    }
  }
};

}  // namespace rlbench
