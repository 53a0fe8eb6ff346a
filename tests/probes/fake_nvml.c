/* A libnvidia-ml.so.1 that answers as the environment says, for the real nvidia-ml-py to load.
 *
 * FAKE_NVML         machine: h100x8, mig, gh200, jetson, odd_name, none
 * FAKE_NVML_BROKEN  function that fails with FAKE_NVML_CODE (default 3, not supported)
 * OLD_LIBRARY       compiled in: symbols of newer drivers are missing
 *
 * Signatures and structures: nvml.h (CUDA toolkit, NVML API reference).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SIZE = 7, DRIVER_NOT_LOADED = 9 };

typedef struct { int index, slice; } device; /* slice: 0 the GPU itself, 1.. a MIG slice of it */
typedef device *handle;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { char legacy[16]; unsigned domain, bus, device_id, pci_id, subsystem; char bus_id[32]; } pci;
typedef struct { unsigned gpu, memory; } utilization;

static device devices[8][3];

static const char *machine(void) {
    const char *name = getenv("FAKE_NVML");
    return name ? name : "none";
}
static int is(const char *name) { return strcmp(machine(), name) == 0; }
static int count(void) { return is("h100x8") ? 8 : is("none") ? 0 : 1; }
static int failure(const char *function) {
    const char *broken = getenv("FAKE_NVML_BROKEN"), *code = getenv("FAKE_NVML_CODE");
    return broken && strcmp(broken, function) == 0 ? (code ? atoi(code) : NOT_SUPPORTED) : OK;
}
#define MAY_FAIL if (failure(__func__)) return failure(__func__)
#define NUMBER(name, value) int name(handle d, unsigned *out) { MAY_FAIL; *out = (value); return OK; }

int nvmlInitWithFlags(unsigned flags) { MAY_FAIL; return is("none") ? DRIVER_NOT_LOADED : OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return "made up"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { MAY_FAIL; snprintf(out, size, "575.57.08"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *out) { MAY_FAIL; *out = 12090; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { MAY_FAIL; *out = count(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *out) {
    MAY_FAIL;
    if ((int)index >= count()) return INVALID;
    devices[index][0].index = index;
    *out = &devices[index][0];
    return OK;
}
int nvmlDeviceGetUUID(handle d, char *out, unsigned size) {
    MAY_FAIL;
    if (is("jetson")) return NOT_SUPPORTED;
    if (d->slice) snprintf(out, size, "MIG-%08x-aaaa-5555-8888-%012x", 0xabc0 + d->slice, d->index);
    else snprintf(out, size, "GPU-%08x-1111-2222-3333-%012x", 0x10 * (d->index + 1), d->index);
    return OK;
}
int nvmlDeviceGetName(handle d, char *out, unsigned size) {
    MAY_FAIL;
    const char *name = is("gh200") ? "NVIDIA GH200 480GB" : is("jetson") ? "Orin (nvgpu)" : "NVIDIA H100 80GB HBM3";
    if (is("odd_name")) name = "NVIDIA \xff\xfe";
    snprintf(out, size, "%s%s", name, d->slice ? " MIG 3g.40gb" : "");
    return OK;
}
int nvmlDeviceGetMemoryInfo(handle d, memory *out) {
    MAY_FAIL;
    if (is("gh200") || is("jetson")) return NOT_SUPPORTED;
    out->total = d->slice ? 42ull << 30 : 80ull << 30;
    out->used = 1 << 20;
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetPciInfo_v3(handle d, pci *out) {
    MAY_FAIL;
    if (d->slice) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x10 + d->index);
    return OK;
}
int nvmlDeviceGetMigMode(handle d, unsigned *now, unsigned *pending) {
    MAY_FAIL;
    if (is("gh200") || is("jetson")) return NOT_SUPPORTED;
    *now = *pending = is("mig");
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(handle d, unsigned *out) { MAY_FAIL; *out = is("mig") ? 7 : 0; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(handle d, unsigned index, handle *out) {
    MAY_FAIL;
    if (!is("mig") || index >= 2) return NOT_FOUND;
    devices[d->index][index + 1] = (device){d->index, (int)index + 1};
    *out = &devices[d->index][index + 1];
    return OK;
}
int nvmlDeviceGetEccMode(handle d, unsigned *now, unsigned *pending) { MAY_FAIL; *now = *pending = 1; return OK; }
int nvmlDeviceGetCudaComputeCapability(handle d, int *major, int *minor) { MAY_FAIL; *major = 9; *minor = 0; return OK; }
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, 1)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetPowerUsage, 71500)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 700000)
int nvmlDeviceGetNvLinkState(handle d, unsigned link, unsigned *out) {
    MAY_FAIL;
    if (!is("h100x8")) return NOT_SUPPORTED;
    *out = link < 18;
    return OK;
}
int nvmlDeviceGetClockInfo(handle d, int kind, unsigned *out) { MAY_FAIL; *out = kind == 1 ? 1980 : 2619; return OK; }
int nvmlDeviceGetTemperature(handle d, int sensor, unsigned *out) { MAY_FAIL; *out = 31; return OK; }
int nvmlDeviceGetUtilizationRates(handle d, utilization *out) { MAY_FAIL; out->gpu = 0; out->memory = 0; return OK; }
int nvmlDeviceGetTopologyCommonAncestor(handle a, handle b, int *out) {
    MAY_FAIL;
    *out = a->index / 4 == b->index / 4 ? 40 : 50;
    return OK;
}
int nvmlDeviceGetP2PStatus(handle a, handle b, int capability, int *out) { MAY_FAIL; *out = 0; return OK; }
#ifdef OLD_LIBRARY
int nvmlDeviceGetCurrentClocksThrottleReasons(handle d, unsigned long long *out) { MAY_FAIL; *out = 4; return OK; }
#else
int nvmlDeviceGetNumaNodeId(handle d, int *out) { MAY_FAIL; *out = is("gh200") ? -1 : d->index / 4; return OK; }
int nvmlDeviceGetCurrentClocksEventReasons(handle d, unsigned long long *out) { MAY_FAIL; *out = 1; return OK; }
int nvmlDeviceGetComputeRunningProcesses_v3(handle d, unsigned *n, void *out) { MAY_FAIL; *n = 0; return OK; }
#endif
