/* lazy_microhttpd.h - microhttpd.h under its own names, loaded by cir_microhttpd_load(): see
 * lazy.h. */
#ifndef CIR_LAZY_MICROHTTPD_H
#define CIR_LAZY_MICROHTTPD_H

#include "lazy.h"

#include <microhttpd.h>

/* The ABI of the headers that this is built with. */
#define CIR_MICROHTTPD_LIBRARY "libmicrohttpd.so.12"

/* clang-format off */
#define CIR_MICROHTTPD_FUNCTIONS(X) \
  X(add_connection) X(add_response_header) X(create_response_for_upgrade) \
  X(create_response_from_buffer) X(create_response_from_callback) X(destroy_response) \
  X(get_connection_info) X(get_connection_values_n) X(get_daemon_info) X(get_timeout) \
  X(lookup_connection_value) X(queue_response) X(resume_connection) X(run) X(start_daemon) \
  X(stop_daemon) X(suspend_connection) X(upgrade_action)
/* clang-format on */

#define CIR_MICROHTTPD_FUNCTION(name) __typeof__(MHD_##name) *name;
extern struct cir_microhttpd_functions {
  CIR_MICROHTTPD_FUNCTIONS(CIR_MICROHTTPD_FUNCTION)
} cir_microhttpd;

/* Load the library once. Returns NULL, or a text that says why it cannot be. */
const char *cir_microhttpd_load(void);

#define MHD_add_connection (cir_microhttpd.add_connection)
#define MHD_add_response_header (cir_microhttpd.add_response_header)
#define MHD_create_response_for_upgrade (cir_microhttpd.create_response_for_upgrade)
#define MHD_create_response_from_buffer (cir_microhttpd.create_response_from_buffer)
#define MHD_create_response_from_callback (cir_microhttpd.create_response_from_callback)
#define MHD_destroy_response (cir_microhttpd.destroy_response)
#define MHD_get_connection_info (cir_microhttpd.get_connection_info)
#define MHD_get_connection_values_n (cir_microhttpd.get_connection_values_n)
#define MHD_get_daemon_info (cir_microhttpd.get_daemon_info)
#define MHD_get_timeout (cir_microhttpd.get_timeout)
#define MHD_lookup_connection_value (cir_microhttpd.lookup_connection_value)
#define MHD_queue_response (cir_microhttpd.queue_response)
#define MHD_resume_connection (cir_microhttpd.resume_connection)
#define MHD_run (cir_microhttpd.run)
#define MHD_start_daemon (cir_microhttpd.start_daemon)
#define MHD_stop_daemon (cir_microhttpd.stop_daemon)
#define MHD_suspend_connection (cir_microhttpd.suspend_connection)
#define MHD_upgrade_action (cir_microhttpd.upgrade_action)

#endif
