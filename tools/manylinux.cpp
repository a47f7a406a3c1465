// Symbols that g++ 11 and newer take from newer libraries than those of manylinux_2_28 (glibc 2.28, libstdc++ of GCC
// 8). Red Hat's compilers for old systems link an archive like this one, libstdc++_nonshared.a.
#include <exception>
#include <new>
#include <sstream>
#include <string>

// glibc 2.32. libstdc++'s reference counts are atomic if it is zero.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.38, whose headers call strtoll by this name.
extern "C" {
long long old_strtoll(const char* text, char** end, int base) noexcept asm("strtoll");
long long __isoc23_strtoll(const char* text, char** end, int base) noexcept { return old_strtoll(text, end, base); }
}

// GLIBCXX_3.4.26 and 3.4.29
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;

#if _GLIBCXX_RELEASE >= 13
// GLIBCXX_3.4.31
template void std::string::_M_replace_cold(char*, std::size_t, const char*, std::size_t, std::size_t);

// GLIBCXX_3.4.32 expects the library to initialize its streams; an older library leaves that to its users.
namespace std {
void ios_base_library_init() {}
}  // namespace std
static std::ios_base::Init streams;
#endif

// GLIBCXX_3.4.29
void std::__throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// CXXABI_1.3.13. The copy constructor and the destructor are in every libstdc++, and inline in the headers since
// GCC 11.
extern "C" {
void copy_exception_ptr(void* self, const void* other) noexcept asm("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void destroy_exception_ptr(void* self) noexcept asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");
}

void std::__exception_ptr::exception_ptr::_M_addref() noexcept {
  void* never_destroyed;
  copy_exception_ptr(&never_destroyed, this);
}

void std::__exception_ptr::exception_ptr::_M_release() noexcept { destroy_exception_ptr(this); }
