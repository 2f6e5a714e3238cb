/* A wall clock that a drill can set, for the programs into which this library is preloaded.
 *
 * It is off by the nanoseconds, a signed 64-bit integer, that the file named by HVDRECOVER_DRILL_CLOCK begins
 * with. The file is mapped, so that all processes see a change at once, and one that is killed holds no lock.
 * The monotonic clock and the times of files stay what they are. Waits until a time of the wall clock are turned
 * into waits until the machine's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

/* A time below that, in seconds, is of a monotonic clock, which has run for less than thirty years. */
#define EPOCHAL 1000000000LL

static const int64_t *offset;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("HVDRECOVER_DRILL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    struct stat status;
    if (file < 0)
        return;
    if (fstat(file, &status) == 0 && status.st_size >= (off_t)sizeof *offset) {
        void *mapped = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
        if (mapped != MAP_FAILED)
            offset = mapped;
    }
    close(file);
}

static int64_t ahead(void)
{
    return offset ? __atomic_load_n(offset, __ATOMIC_RELAXED) : 0;
}

static void shift(struct timespec *time, int64_t by)
{
    int64_t sum = time->tv_nsec + by % SECOND;
    time->tv_sec += by / SECOND + (sum >= SECOND) - (sum < 0);
    time->tv_nsec = sum + (sum < 0 ? SECOND : 0) - (sum >= SECOND ? SECOND : 0);
}

/* The next definition of a function; of one with several, that for which programs are linked today. */
static void *next(const char *name)
{
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

#define NEXT(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))next(#name)

int clock_gettime(clockid_t clock, struct timespec *time)
{
    NEXT(clock_gettime);
    int failed = real(clock, time);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        shift(time, ahead());
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec time;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &time))
        return -1;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}

/* The machine's time for one of the wall clock; times of monotonic clocks are left alone. */
#define MACHINES(until) \
    struct timespec machines = *(until); \
    if (machines.tv_sec >= EPOCHAL) \
        shift(&machines, -ahead())

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    NEXT(clock_nanosleep);
    if (clock != CLOCK_REALTIME || !(flags & TIMER_ABSTIME))
        return real(clock, flags, until, left);
    MACHINES(until);
    return real(clock, flags, &machines, left);
}

int pthread_cond_timedwait(
    pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    NEXT(pthread_cond_timedwait);
    MACHINES(until);
    return real(condition, mutex, &machines);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    NEXT(pthread_mutex_timedlock);
    MACHINES(until);
    return real(mutex, &machines);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    NEXT(sem_timedwait);
    MACHINES(until);
    return real(semaphore, &machines);
}
