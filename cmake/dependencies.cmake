# What the core is built from. All of it is header-only or linked statically: the module needs nothing at run
# time beyond libc and libstdc++.
find_package(Threads REQUIRED)

macro(tpusync_missing what package)
  message(FATAL_ERROR "${what} was not found. On Debian or Ubuntu: apt-get install ${package}")
endmacro()

find_package(fmt CONFIG QUIET)
if(NOT fmt_FOUND)
  tpusync_missing("fmt" libfmt-dev)
endif()
find_package(tl-expected CONFIG QUIET)
if(NOT tl-expected_FOUND)
  tpusync_missing("tl::expected" libexpected-dev)
endif()

find_path(TPUSYNC_XXHASH_INCLUDE xxhash.h)
if(NOT TPUSYNC_XXHASH_INCLUDE)
  tpusync_missing("xxhash.h" libxxhash-dev)
endif()
add_library(tpusync_xxhash INTERFACE)
target_include_directories(tpusync_xxhash SYSTEM INTERFACE ${TPUSYNC_XXHASH_INCLUDE})

# HMAC-SHA-256 and SipHash of the transport. Static, so that the module needs no library at run time; see
# docs/design/003-transport.md for why not OpenSSL.
find_path(TPUSYNC_SODIUM_INCLUDE sodium.h)
find_library(TPUSYNC_SODIUM_LIBRARY libsodium.a)
if(NOT TPUSYNC_SODIUM_INCLUDE OR NOT TPUSYNC_SODIUM_LIBRARY)
  tpusync_missing("libsodium.a" libsodium-dev)
endif()
add_library(tpusync_sodium INTERFACE)
target_include_directories(tpusync_sodium SYSTEM INTERFACE ${TPUSYNC_SODIUM_INCLUDE})
target_link_libraries(tpusync_sodium INTERFACE ${TPUSYNC_SODIUM_LIBRARY})

# io_uring is optional: without it reads and writes go through a pool of threads.
find_path(TPUSYNC_URING_INCLUDE liburing.h)
find_library(TPUSYNC_URING_LIBRARY liburing.a)
if(TPUSYNC_URING_INCLUDE AND TPUSYNC_URING_LIBRARY)
  message(STATUS "io_uring: ${TPUSYNC_URING_LIBRARY}")
else()
  message(STATUS "io_uring: liburing was not found (apt-get install liburing-dev); building without it")
endif()

if(TPUSYNC_TESTS)
  find_package(GTest CONFIG QUIET)
  if(NOT GTest_FOUND)
    tpusync_missing("GoogleTest" libgtest-dev)
  endif()
endif()
