// malloc whose large blocks end at a page without access: a write behind one ends the process there and then.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

enum { kPage = 4096, kLeast = 4096, kSlots = 1 << 20 };

extern void* __libc_malloc(size_t);
extern void __libc_free(void*);
extern void* __libc_realloc(void*, size_t);
extern void* __libc_memalign(size_t, size_t);

struct block {
  char *start, *mapped;
  size_t all, size;
};

static struct block blocks[kSlots];  // by address, with open addressing
static char* const kRemoved = (char*)1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t slot_of(void* p) { return ((uintptr_t)p >> 4) * 0x9E3779B97F4A7C15UL >> 44; }

static void* fenced(size_t size, size_t alignment) {
  if (alignment < 16) alignment = 16;
  const size_t body = (size + alignment + kPage - 1) / kPage * kPage;
  char* mapped = mmap(0, body + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 0;
  mprotect(mapped + body, kPage, PROT_NONE);
  char* start = (char*)((uintptr_t)(mapped + body - size) & ~(alignment - 1));
  pthread_mutex_lock(&lock);
  size_t i = slot_of(start);
  while (blocks[i].start && blocks[i].start != kRemoved) i = (i + 1) % kSlots;
  blocks[i] = (struct block){start, mapped, body + kPage, size};
  pthread_mutex_unlock(&lock);
  return start;
}

static struct block find(void* p, int removes) {
  struct block found = {0};
  pthread_mutex_lock(&lock);
  for (size_t i = slot_of(p); blocks[i].start; i = (i + 1) % kSlots) {
    if (blocks[i].start != p) continue;
    found = blocks[i];
    if (removes) blocks[i].start = kRemoved;
    break;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

void* malloc(size_t size) { return size < kLeast ? __libc_malloc(size) : fenced(size, 16); }

void free(void* p) {
  if (!p) return;
  const struct block b = find(p, 1);
  if (b.start) {
    munmap(b.mapped, b.all);
  } else {
    __libc_free(p);
  }
}

void* calloc(size_t count, size_t each) {
  size_t size;
  if (__builtin_mul_overflow(count, each, &size)) {
    errno = ENOMEM;
    return 0;
  }
  void* p = malloc(size);
  if (p) memset(p, 0, size);
  return p;
}

void* memalign(size_t alignment, size_t size) {
  return size < kLeast ? __libc_memalign(alignment, size) : fenced(size, alignment);
}

void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void** result, size_t alignment, size_t size) {
  *result = memalign(alignment, size);
  return *result ? 0 : ENOMEM;
}

size_t malloc_usable_size(void* p) {
  if (!p) return 0;
  const struct block b = find(p, 0);
  return b.start ? b.size : (((size_t*)p)[-1] & ~(size_t)7) - sizeof(size_t);
}

void* realloc(void* p, size_t size) {
  if (!p) return malloc(size);
  if (!find(p, 0).start && size < kLeast) return __libc_realloc(p, size);
  const size_t before = malloc_usable_size(p);
  void* moved = malloc(size);
  if (moved) {
    memcpy(moved, p, before < size ? before : size);
    free(p);
  }
  return moved;
}
