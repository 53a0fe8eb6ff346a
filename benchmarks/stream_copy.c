/* STREAM's copy and triad (www.cs.virginia.edu/stream) on one core: bytes per second of each, one line a pass.
 * Usage: stream_copy WORDS PASSES. Bytes are counted as STREAM does: read and written, without write-allocates. Time is
 * what the thread had a processor for, as the probe, too, leaves out what it waited; the share of it comes last. */
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    size_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 0, passes = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    double *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), *c = malloc(n * sizeof *c);
    if (n == 0 || passes == 0 || !a || !b || !c)
        return 1;
    for (size_t i = 0; i < n; i++) {
        a[i] = 1.0;
        b[i] = 2.0;
        c[i] = 0.0;
    }
    for (size_t pass = 0; pass <= passes; pass++) {
        double wall = now(CLOCK_MONOTONIC), start = now(CLOCK_THREAD_CPUTIME_ID);
        for (size_t i = 0; i < n; i++)
            c[i] = a[i];
        double copied = now(CLOCK_THREAD_CPUTIME_ID);
        for (size_t i = 0; i < n; i++)
            a[i] = b[i] + 3.0 * c[i];
        double done = now(CLOCK_THREAD_CPUTIME_ID);
        wall = now(CLOCK_MONOTONIC) - wall;
        if (pass > 0) /* the first one warms up */
            printf("%.0f %.0f %.3f\n", 2.0 * 8.0 * (double)n / (copied - start),
                   3.0 * 8.0 * (double)n / (done - copied), (done - start) / wall);
        if (a[n - 1] < 0.0 || c[0] < 0.0) /* keeps the loops from being optimised away */
            return 2;
    }
    return 0;
}
