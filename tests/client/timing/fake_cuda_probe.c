/* A CUDA driver library whose GPU runs a probe at its launch: it counts at a clock that the test sets, and its timer is
   ahead of the host's clock. FAKE_CUDA_FAIL names a function that fails, FAKE_CUDA_CONTEXT is empty without a context. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OK = 0, FAILED = 999 };
static const int64_t AHEAD_NS = 123456789012345;
static void *const CONTEXT = (void *)0x7f0000000001, *const MODULE = (void *)0x7f0000000002;
static void *const FUNCTION = (void *)0x7f0000000003, *const STREAM = (void *)0x7f0000000004;
static int64_t clock_mhz = 1980, is_stuck = 0, interrupted_ns = 0;
int num_contexts_made = 0, num_launches = 0;

void fake_set(int64_t mhz, int64_t stuck) { clock_mhz = mhz; is_stuck = stuck; interrupted_ns = 0; }
void fake_interrupt(int64_t time_ns) { interrupted_ns = time_ns; }

static int called(const char *name) {
    const char *failing = getenv("FAKE_CUDA_FAIL");
    return failing && !strcmp(failing, name) ? FAILED : OK;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int cuInit(unsigned flags) { (void)flags; num_contexts_made++; return OK; }
int cuCtxCreate_v2(void **context, unsigned flags, int device) { (void)context; (void)flags; (void)device; num_contexts_made++; return FAILED; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)context; (void)device; num_contexts_made++; return FAILED; }
int cuCtxGetCurrent(void **context) {
    *context = getenv("FAKE_CUDA_CONTEXT") ? NULL : CONTEXT;
    return called("cuCtxGetCurrent");
}
int cuMemHostRegister_v2(void *memory, size_t size, unsigned flags) { return memory && size && flags == 3 ? called("cuMemHostRegister") : FAILED; }
int cuMemHostGetDevicePointer_v2(uint64_t *pointer, void *memory, unsigned flags) { *pointer = (uint64_t)memory; return flags ? FAILED : OK; }
int cuModuleLoadData(void **module, const char *image) { *module = MODULE; return strstr(image, ".entry probe(") ? called("cuModuleLoadData") : FAILED; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = FUNCTION;
    return module == MODULE && !strcmp(name, "probe") ? OK : FAILED;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = STREAM; return flags == 1 ? called("cuStreamCreate") : FAILED; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void *stream, void **arguments, void **extra) {
    int is_one_thread = gx * gy * gz == 1 && bx * by * bz == 1 && !shared_bytes;
    if (function != FUNCTION || !is_one_thread || stream != STREAM || extra) return FAILED;
    volatile uint64_t *out = *(uint64_t **)arguments[0];
    uint64_t counted_ns = *(uint64_t *)arguments[1], number = *(uint64_t *)arguments[2];
    int64_t begun_ns = now_ns();
    num_launches++;
    if (called("cuLaunchKernel")) return FAILED;
    out[0] = (uint64_t)clock_mhz * counted_ns / 1000;
    out[1] = counted_ns + (uint64_t)interrupted_ns;
    out[2] = (uint64_t)(begun_ns + AHEAD_NS);
    if (!is_stuck) out[3] = number;
    return OK;
}
