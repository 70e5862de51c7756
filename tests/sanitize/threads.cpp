// OpenMP's one construct that ATen's parallel_for compiles to, on threads that ThreadSanitizer sees being started and
// joined. The real one (libgomp) is not instrumented: its barriers go unseen, and every parallel loop would be
// reported. Hidden, so that it serves this library alone.
#include <thread>
#include <vector>

namespace at {
int get_num_threads();
}

namespace {
thread_local int number = 0;
thread_local int team = 1;

void run_as(int thread, int threads, void (*body)(void*), void* data) {
  number = thread, team = threads;
  body(data);
  number = 0, team = 1;
}
}  // namespace

extern "C" {
__attribute__((visibility("hidden"))) int omp_get_thread_num() { return number; }
__attribute__((visibility("hidden"))) int omp_get_num_threads() { return team; }

__attribute__((visibility("hidden"))) void GOMP_parallel(void (*body)(void*), void* data, unsigned, unsigned) {
  const int threads = at::get_num_threads();
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run_as, i, threads, body, data);
  run_as(0, threads, body, data);
  for (std::thread& other : others) other.join();
}
}
