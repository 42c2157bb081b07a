/* A CUDA driver library with one GPU that computes nothing: it writes the name of each call into a file.
   FAKE_CUDA_LOG names the file, FAKE_CUDA_FAIL a function that fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, FAILED = 999 };
static int num_launches = 0;

static int called(const char *name) {
    const char *failing = getenv("FAKE_CUDA_FAIL");
    FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
    if (log) {
        fprintf(log, "%s\n", name);
        fclose(log);
    }
    return failing && !strcmp(failing, name) ? FAILED : OK;
}

int cuInit(unsigned flags) { return flags ? FAILED : called("cuInit"); }
int cuDeviceGetCount(int *count) { *count = 2; return OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 10; return OK; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int k = 0; k < 16; k++) uuid[k] = (unsigned char)(16 * (device - 10) + k);
    return OK;
}
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { return device == 11 && flags == 4 ? OK : FAILED; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x7f0000000001; return device == 11 ? called("retain") : FAILED; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device == 11 ? called("release") : FAILED; }
int cuCtxSetCurrent(void *context) { return context == (void *)0x7f0000000001 ? OK : FAILED; }
int cuModuleLoadData(void **module, const char *image) { *module = (void *)0x7f0000000002; return strstr(image, ".entry spin(") ? called("cuModuleLoadData") : FAILED; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
    *function = (void *)0x7f0000000003;
    return module == (void *)0x7f0000000002 && !strcmp(name, "spin") ? OK : FAILED;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared_bytes, void *stream, void **arguments, void **extra) {
    int is_valid = function == (void *)0x7f0000000003 && gx * gy * gz == 1 && bx == 32 && by * bz == 1 && !shared_bytes && !stream
        && *(unsigned long long *)arguments[0] > 1000000 && !extra;
    num_launches += 1;
    return !is_valid ? FAILED : num_launches == 1 ? called("cuLaunchKernel") : OK;
}
int cuCtxSynchronize(void) { usleep(1000); return OK; }
int cuGetErrorName(int code, const char **text) { *text = code == FAILED ? "CUDA_ERROR_UNKNOWN" : "?"; return OK; }
