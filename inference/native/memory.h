// Memory in whole pages.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace {

constexpr size_t HUGE_PAGE_BYTES = 2 << 20;

// Zeroed memory, allocated by the system page by page on first use; or a read-only view of other
// memory.
template <class T> class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t count) : count_(count) {
        const size_t bytes = std::max<int64_t>(count, 1) * sizeof(T);
        void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T *>(memory);
        bytes_ = bytes;
    }
    static Buffer view(const void *memory, int64_t count) { // the memory must outlive it
        Buffer buffer;
        buffer.data_ = const_cast<T *>(static_cast<const T *>(memory));
        buffer.count_ = count;
        return buffer;
    }
    Buffer(Buffer &&other) noexcept { *this = std::move(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Buffer() {
        if (bytes_) munmap(data_, bytes_); // a view has none
    }
    T *data() const { return data_; }
    int64_t count() const { return count_; }
    void reserve(int64_t count) {
        if (count > count_) *this = Buffer(count);
    }
    // Lets the system merge pages into huge ones in the background: streaming is about 3 % faster.
    // Advising before they are filled would zero huge pages at once, which took 5 times as long on
    // a virtual machine.
    void join_pages() const {
        if (bytes_ >= HUGE_PAGE_BYTES) madvise(data_, bytes_, MADV_HUGEPAGE);
    }

  private:
    T *data_ = nullptr;
    int64_t count_ = 0;
    size_t bytes_ = 0;
};

} // namespace
